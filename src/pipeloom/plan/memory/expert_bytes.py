"""Bytes that a forward of a layer of experts keeps on one process. No torch.

For T tokens of the process, k experts per token, A = k T assignments (less where a capacity drops them), R rows that
its experts compute (A, if experts are balanced), E experts, width W, an expert's width F, numbers of e bytes, and
w = max(4, e):

    router's input     w T W              switch: 2 w T W. With 16-bit tokens w E W more, for its weight in float32;
                                          noisy-topk twice as much then
    choice             w T E + 8 T k + w T (k + 1)       see `_choice` for other routers
    order              (16 + e) A         expert-choice: (8 + e) A. With other processes' experts 16 R more, or with
                                          capacity 8 A
    experts            e R (W + 2 F / t)  gated: 4 F; the input of each product, and GELU's
    combine            e A W              results before they are weighted; with capacity 2 e A W, the rows too
    shared experts     e T 2 F / t each

t tensor-parallel processes have the same tokens, also with sequence parallelism.
"""

from pipeloom.parallel.expert.sizes import ExpertSizes
from pipeloom.parallel.inside_stage import InsideStage


def expert_bytes(
    sizes: ExpertSizes,
    width: int,
    *,
    samples: float,
    tokens: float,
    e: int,
    inside: InsideStage,
    imbalance: float = 1.0,
) -> float:
    """The bytes, with the input of the router and without that of shared experts.

    Args:
        sizes: of the experts.
        width: of the residual stream.
        samples, tokens: of this process.
        e: bytes of a number in forwards.
        inside: the processes.
        imbalance: rows of the busiest process over the mean.
    """
    wide = max(4, e)
    assignments = sizes.assignments(round(samples), round(tokens))
    padded = inside.expert > 1 and inside.exchange == "capacity"
    rows = imbalance * assignments if inside.expert > 1 else assignments
    if padded:
        rows = sizes.experts * sizes.capacity(round(samples), round(tokens))
    inner = (4 if sizes.gated else 2) * sizes.expert_width / inside.tensor
    inputs = wide * tokens * width * (2 if sizes.router == "switch" else 1)
    if e < 4:
        inputs = sizes.router_matrices * (inputs + wide * sizes.experts * width)
    order: float = (8 if sizes.router == "expert-choice" else 16) * assignments + e * assignments
    if padded:
        order += 8 * assignments
    elif inside.expert > 1 and sizes.experts > inside.expert:
        order += 16 * rows
    computed = rows * (width + inner) + sizes.shared * tokens * inner
    combined = (2 if padded else 1) * assignments * width
    return inputs + _choice(sizes, tokens, wide, assignments) + order + e * (computed + combined)


def _choice(sizes: ExpertSizes, tokens: float, wide: int, assignments: int) -> float:
    """Bytes that choosing experts keeps."""
    table, k = wide * tokens * sizes.experts, sizes.top_k
    z_loss = table + wide * tokens if sizes.z_loss else 0.0
    match sizes.router:
        case "switch":
            return table + 8 * tokens + z_loss
        case "expert-choice":
            return table + 8 * assignments + z_loss
        case "noisy-topk":  # logits, noise and probabilities of the load
            more = 6 * table + tokens * sizes.experts
            return more + 8 * tokens * min(k + 1, sizes.experts) + wide * tokens * k + z_loss
        case _:
            return table + 8 * tokens * k + wide * tokens * (k + 1) + z_loss
