"""`pipeloom plan --html`: one page that stands alone and says which plan won."""

from __future__ import annotations

import json

from pipeloom.cli import main
from tests.pure.test_reports import page_of

LINE = "plan --model.layers 4 --model.width 64 --model.heads 4 --cluster dgx-h100 --devices 8 --batch.size 16 --top 3"


def test_the_page_of_a_plan(capsys, tmp_path):
    file = tmp_path / "plans.html"
    assert main([*LINE.split(), "--html", str(file)]) == 0
    printed = capsys.readouterr().out
    assert f"wrote {file}" in printed
    text = page_of(file.read_text(encoding="utf-8"))
    assert main([*LINE.split(), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    best = answer["plans"][0]
    degrees = [f"{name} {best[name]}" for name in ("pipeline", "data", "tensor", "context") if best[name] > 1]
    assert f"The best is {' x '.join(degrees)}: " in text
    assert text.count("plan 2") == 2, "its bar, and why it lost"
    for reason, count in answer["refused"].items():
        assert f"{reason} {count:,}" in text
    for line in printed.splitlines():
        if line.startswith(("usual choice", "plan 2")):
            assert line in text, "why it lost"
    for heading in ("Where the time goes", "Memory of the best plan", "Timeline of the best plan"):
        assert heading in text


def test_json_is_printed_beside_a_page(capsys, tmp_path):
    file = tmp_path / "plans.html"
    assert main([*LINE.split(), "--html", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plans"]
    assert "usual choice" in file.read_text(encoding="utf-8")
