"""Write the pages of the API reference: ``python docs/api.py``.

One page per public package, with one entry per name in the package's ``__all__``; mkdocstrings fills them from the
docstrings when the site is built. tests/pure/test_docs.py fails where the committed pages are out of date.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
PAGES = ROOT / "docs" / "reference" / "api"
TITLES = {
    "pipeloom": "Top-level names, as in `import pipeloom as pl`",
    "pipeloom.training": "Pipeline, Stream, optimizer steps, clipping",
    "pipeloom.parallel": "Device mesh, data parallelism, ZeRO, mixed precision, offload",
    "pipeloom.parallel.context": "Context parallelism: several ranks share the tokens of each sequence",
    "pipeloom.autograd": "Auxiliary losses and quantities that a model declares in its forward",
    "pipeloom.pretrained": "Models of Hugging Face directories",
    "pipeloom.data": "Training data: corpora, tokenizers, the order of samples",
    "pipeloom.pipe": "Pipe: a pipeline in one process, used like a module; skips",
    "pipeloom.schedules": "Schedule families, and schedules from functions and files",
    "pipeloom.ir": "Actions, placements, schedules, programs, the checker",
    "pipeloom.passes": "Lowering a schedule to a program",
    "pipeloom.sim": "Simulation and timelines",
    "pipeloom.split": "Splitting a model into stages",
    "pipeloom.slicing": "Sequence slices inside a model",
    "pipeloom.models": "A small GPT for examples and tests",
    "pipeloom.report": "Timelines as text, SVG, HTML and traces",
    "pipeloom.errors": "Exceptions that pipeloom raises",
    "pipeloom.train.checkpoint": "Saving and loading checkpoints",
    "pipeloom.plan": "Plans: what a run needs, as data",
    "pipeloom.plan.partition": "Partitioning a model into stages with replicas",
    "pipeloom.plan.slicing": "Where to slice a sequence",
    "pipeloom.plan.memory": "Memory estimates",
    "pipeloom.plan.collectives": "Collectives as sends, step by step",
    "pipeloom.transport": "Messages between ranks",
    "pipeloom.devices": "Devices: streams, marks, times, memory",
    "pipeloom.models.experts": "Layers of experts",
    "pipeloom.integrations.transformers": "transformers' Trainer on a pipeline",
    "pipeloom.integrations.ray": "`pipeloom train` in the workers of Ray",
    "pipeloom.job_files": "Files that start a run on a cluster",
}
CONSTANTS = {"__version__": "the version of pipeloom, a string"}  # top-level names without a package of their own


def public_names(package: str) -> list[str]:
    """The names in the package's ``__all__``, or the exceptions of `pipeloom.errors`; nothing is imported."""
    path = SOURCE / package.replace(".", "/")
    if package == "pipeloom.errors":
        body = ast.parse(path.with_suffix(".py").read_text(encoding="utf-8")).body
        return [node.name for node in body if isinstance(node, ast.ClassDef)]
    for node in ast.parse((path / "__init__.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return sorted(ast.literal_eval(node.value))
    return []


def public_packages() -> list[str]:
    """All packages with an ``__all__``: those of `TITLES` in that order, then the others."""
    found = {"pipeloom.errors"} | {
        ".".join(file.parent.relative_to(SOURCE).parts) for file in SOURCE.rglob("__init__.py")
    }
    public = {package for package in found if public_names(package)}
    return [package for package in TITLES if package in public] + sorted(public - TITLES.keys())


def home_of(name: str) -> str | None:
    """The page that documents a top-level name: a package of its own, or the first that exports the name."""
    packages = public_packages()
    if f"pipeloom.{name}" in packages:
        return f"pipeloom.{name}"
    return next((package for package in packages if package != "pipeloom" and name in public_names(package)), None)


def pages() -> dict[str, str]:
    """File name -> text of every page of the API reference."""
    packages = public_packages()
    rows = "\n".join(f"| [`{package}`]({package}.md) | {TITLES.get(package, '')} |" for package in packages)
    found = {"index.md": f"# API reference\n\n| package | contents |\n|---|---|\n{rows}\n"}
    for package in packages:
        entries = (
            [_row(name) for name in public_names(package)]
            if package == "pipeloom"
            else [f"\n::: {package}.{name}" for name in public_names(package)]
        )
        head = "\n| name | documented in |\n|---|---|\n" if package == "pipeloom" else ""
        found[f"{package}.md"] = f"# {package}\n\n{TITLES.get(package, '')}.\n{head}" + "\n".join(entries) + "\n"
    return found


def _row(name: str) -> str:
    home = home_of(name)
    if home is None:
        return f"| `pl.{name}` | {CONSTANTS[name]} |"
    anchor = "" if home == f"pipeloom.{name}" else f"#{home}.{name}"
    return f"| [`pl.{name}`]({home}.md{anchor}) | [`{home}`]({home}.md) |"


def main() -> None:
    """Write the pages; remove those of packages that are gone."""
    PAGES.mkdir(parents=True, exist_ok=True)
    texts = pages()
    for old in PAGES.glob("*.md"):
        if old.name not in texts:
            old.unlink()
    for name, text in texts.items():
        (PAGES / name).write_text(text, encoding="utf-8")
        print(PAGES / name)


if __name__ == "__main__":
    main()
