import json
import sys
from xml.etree import ElementTree

from scripts import docs_overoptimization


def test_the_picture_is_drawn_from_studies_of_finished_runs(tmp_path, monkeypatch):
    points = [{"kl": 0.1, "proxy": 0.5, "gold": 1.7}, {"kl": 2.0, "proxy": 1.5, "gold": 2.6}]
    for seed in ("0", "1"):
        (tmp_path / seed / "study").mkdir(parents=True)
        (tmp_path / seed / "study/results.json").write_text(json.dumps({"series": {"PPO": points}}))
    monkeypatch.setattr(docs_overoptimization, "PICTURE", tmp_path / "picture.svg")
    monkeypatch.setattr(sys, "argv", ["", str(tmp_path / "0"), str(tmp_path / "1")])
    docs_overoptimization.main()
    texts = [each.text for each in ElementTree.parse(tmp_path / "picture.svg").iter() if each.tag.endswith("}text")]
    assert {"true reward", "score of the reward model", "seed 0", "seed 1"} <= set(texts) and "seed 2" not in texts
