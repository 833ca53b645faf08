"""The routers by name.

name            experts per token                   balanced by                   source
topk            `top_k`, softmax                    loss                          Mixtral, arXiv:2401.04088
switch          1, softmax, jitter                  capacity, loss                arXiv:2101.03961
gshard          2, softmax, second at random        capacity, loss                arXiv:2006.16668
glam            2, softmax                          capacity, loss                arXiv:2112.06905
noisy-topk      `top_k`, softmax of noisy logits    losses of importance, load    arXiv:1701.06538
sigmoid         `top_k`, sigmoids                   bias, moved after each step   DeepSeek-V3, arXiv:2412.19437
expert-choice   any number, `top_k` on average      experts choose tokens         arXiv:2202.09368
"""

from pipeloom.models.experts.expert_choice import ExpertChoice
from pipeloom.models.experts.noisy import NoisyTopK
from pipeloom.models.experts.router import Router
from pipeloom.models.experts.settings import ExpertSettings
from pipeloom.models.experts.sigmoid import Sigmoid
from pipeloom.models.experts.softmax_routers import GLaM, GShard, Switch, TopK

CLASSES: dict[str, type[Router]] = {
    "topk": TopK,
    "switch": Switch,
    "gshard": GShard,
    "glam": GLaM,
    "noisy-topk": NoisyTopK,
    "sigmoid": Sigmoid,
    "expert-choice": ExpertChoice,
}


def make_router(width: int, settings: ExpertSettings) -> Router:
    """The router that `settings` names."""
    return CLASSES[settings.router](width, settings)
