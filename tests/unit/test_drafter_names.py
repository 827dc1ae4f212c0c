"""Drafters by name: known ones, checkpoints of one's own, and clear errors before any model is loaded."""

from __future__ import annotations

import pytest
import torch

from dspec_lab.checkpoints.layout import build_model, write_checkpoint
from dspec_lab.drafters.architecture import MedusaArchitecture
from dspec_lab.evaluation import drafters
from dspec_lab.models.family import model_spec
from dspec_lab.verifier.tiny import tiny_config, tiny_decoder


@pytest.fixture
def no_weights(tmp_path, monkeypatch):
    monkeypatch.setenv("DSPEC_DATA", str(tmp_path))
    return tmp_path


def test_trained_drafters_are_offered_only_with_their_weights(no_weights):
    assert drafters.available() == ("prompt_lookup", "lookahead", "autoregressive")
    with pytest.raises(ValueError, match="drafter dspark: .* is no checkpoint"):
        drafters.check_names(["dspark"])
    folder = drafters.trained_folder("dspark")
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert "dspark" in drafters.available()
    assert drafters.check_names(["dspark"]) == ("dspark",)


@pytest.mark.parametrize(
    ("names", "named"),
    [
        ([], "no drafter was named"),
        (["oracle"], "unknown drafter 'oracle'"),
        (["lookahead", "lookahead"], "named twice"),
        (["a/b=here"], "'a/b=here'"),
        (["mine="], "'mine='"),
        (["mine=nowhere"], "drafter mine: nowhere is no checkpoint"),
    ],
)
def test_bad_names(names, named):
    with pytest.raises(ValueError, match=named):
        drafters.check_names(names)


def test_a_checkpoint_of_ones_own(tmp_path):
    target = tiny_decoder()
    config = tiny_config(target.vocab_size, target.num_layers)
    arch = MedusaArchitecture(spec=model_spec(config), num_target_layers=target.num_layers, medusa_num_heads=2)
    torch.manual_seed(0)
    model = build_model(arch)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    write_checkpoint(tmp_path / "mine", model.requires_grad_(False), config)
    made = drafters.build_drafters([f"mine={tmp_path / 'mine'}", "prompt_lookup"], target)
    assert list(made) == ["mine", "prompt_lookup"] and made["mine"].name == "mine"
