"""`dspec calibrate` and the options that use its file."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

import numpy as np
import pytest

from dspec_lab.calibration.calibration import fit_calibration, load_calibration
from dspec_lab.calibration.synthetic import synthetic_rounds
from dspec_lab.cli import options
from dspec_lab.cli.calibrate import at_the_edge
from dspec_lab.cli.main import main
from dspec_lab.drafters.autoregressive import AutoregressiveDrafter
from dspec_lab.models.toy import TableTarget
from dspec_lab.verifier.trace import write_trace


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    rounds = synthetic_rounds(1200, (2.0, 2.0), prompts=12, seed=0)
    rows = [
        {
            "request_id": prompt, "prompt_id": prompt, "domain": domain, "drafter": "dspark", "temperature": 1.0,
            "round": i, "context_tokens": 1, "gamma": 2, "draft_ids": [0, 0], "confidence": confidence,
            "accepted": [kept > 0, kept > 1], "num_accepted": kept, "accept_prob": chance,
            "target_entropy_bits": [0.0, 0.0], "draft_entropy_bits": [0.0, 0.0], "draft_s": 0.0, "verify_s": 0.0,
            "overhead_s": 0.0,
        }
        for i, (prompt, domain, kept, confidence, chance) in enumerate(
            zip(rounds.prompt_I.tolist(), rounds.domain_I.tolist(), rounds.num_accepted_I.tolist(),
                rounds.confidence_IG.tolist(), rounds.accept_prob_IG.tolist(), strict=True)
        )
    ]  # fmt: skip
    return write_trace(tmp_path_factory.mktemp("trace") / "t.parquet", rows)


def test_it_fits_judges_and_writes(trace, tmp_path, capsys):
    (tmp_path / "model.safetensors").write_bytes(b"w")
    out, report = tmp_path / "sts.json", tmp_path / "r.json"
    status = main(["calibrate", str(trace), "--out", str(out), "--checkpoint", str(tmp_path), "--json", str(report)])
    assert status == 0
    fitted, result = load_calibration(out), json.loads(report.read_text())
    assert fitted.provenance.data == ("t.parquet",) and fitted.provenance.drafter_hash
    assert [m.temperature for m in fitted.maps] == result["maps"]
    assert set(result["mean_ece"]) == {"none", "temperature", "platt", "isotonic", "entropy"}
    assert result["mean_ece"]["temperature"] < result["mean_ece"]["none"]
    shown = capsys.readouterr().out
    assert "mean held-out ECE of survival" in shown and "AUROC" in shown
    assert "goals: mean ECE after at most 2 %" in shown and "chat, platt: " in shown
    judged = [(row["domain"], row["fitted_on"], row["method"]) for row in result["by_domain"]]
    assert len(set(judged)) == len(judged) == 4 * (4 + 3) and ("chat", "chat", "platt") in judged
    assert {row["signal"] for row in result["signals"]} == {"confidence", "draft_entropy", "both", "chance"}


def test_one_domain_alone_is_fitted_and_judged(trace, tmp_path):
    out, report = tmp_path / "sts.json", tmp_path / "r.json"
    assert main(["calibrate", str(trace), "--domain", "chat", "--out", str(out), "--json", str(report)]) == 0
    fitted, result = load_calibration(out), json.loads(report.read_text())
    assert dict(fitted.provenance.domain_shares) == {"chat": 1.0}
    assert {row["domain"] for row in result["by_domain"]} == {"chat"} and result["folds"] == 4


def test_a_temperature_at_an_end_of_the_grid_is_told():
    made = synthetic_rounds(900, (1.0, 1.0), prompts=12, seed=2)
    # no second draft ever survives
    fitted = fit_calibration(replace(made, num_accepted_I=np.minimum(made.num_accepted_I, 1)), resamples=100)
    assert [text.split(":")[0] for text in at_the_edge(fitted)] == ["position 2"]


def test_a_check_refuses_the_prompts_of_the_fit_and_tells_of_drift(trace, tmp_path, capsys):
    rounds = synthetic_rounds(1200, (2.0, 2.0), prompts=12, level=-1.0, seed=3, drafter="dspark")
    other = replace(rounds, prompt_I=np.char.add(rounds.prompt_I, " new"))
    path = fit_calibration(other, resamples=100).save(tmp_path / "sts.json")
    report = tmp_path / "r.json"
    # fitted on harder rounds: the confidences of this trace have another shape
    assert main(["calibrate", str(trace), "--check", str(path), "--json", str(report)]) == 1
    found = json.loads(report.read_text())
    assert any("another shape" in text for text in found["drift"]) and len(found["after"]) == 3
    assert "drift: position 1" in capsys.readouterr().out
    assert main(["calibrate", str(trace), "--out", str(path)]) == 0
    assert main(["calibrate", str(trace), "--check", str(path)]) == 2
    assert "were used to fit and would be judged on" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["calibrate", str(trace)])
    assert ended.value.code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "magic"], "method must be one of temperature, platt, isotonic, entropy, got 'magic'"),
        (["--labels", "guess"], "labels must be outcome or expected, got 'guess'"),
        (["--held-out", "1.5"], "must lie between 0 and 1, got 1.5"),
        (["--bins", "0"], "at least 1 bin, got 0"),
        (["--domain", "law"], "no round of the domain 'law'; there are chat, code, math"),
        (["--folds", "99"], "--folds must lie in 2..12, the number of prompts, got 99"),
        (["--drafter", "eagle3"], "the trace has no drafter 'eagle3'; it has dspark"),
        (["--checkpoint", "nowhere"], "nowhere is no checkpoint"),
        (["--out", "nowhere/x.json"], "give a file in a folder that exists"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(trace, tmp_path, capsys, arguments, message):
    status = main(["calibrate", str(trace), "--out", str(tmp_path / "x.json"), *arguments])
    text = capsys.readouterr().err
    assert status == 2 and message in text and text.count("\n") == 1
    assert not (tmp_path / "x.json").exists()


def parsed(**values):
    return argparse.Namespace(**({"calibration": None, "confidence_threshold": None} | values))


def test_options_dress_the_drafters_they_fit(tmp_path):
    fitted = fit_calibration(synthetic_rounds(600, (1.5, 1.5), drafter="toy", seed=1), resamples=100)
    path = fitted.save(tmp_path / "sts.json")
    drafters = {name: AutoregressiveDrafter(TableTarget.random(3), name=name) for name in ("toy", "other")}
    args = parsed(calibration=str(path), confidence_threshold=0.4)
    calibration = options.check_confidence(args, ["toy", "other"])
    made = options.dressed(drafters, ["toy", "other"], args, calibration)
    assert list(made) == ["toy+sts@0.4", "other@0.4"]
    assert options.dressed(drafters, ["toy", "other"], parsed(), None) == drafters
    with pytest.raises(ValueError, match="was fitted for the drafter 'toy', not for other"):
        options.check_confidence(args, ["other"])
    with pytest.raises(ValueError, match="in 0..1, got 1.4"):
        options.check_confidence(parsed(confidence_threshold=1.4), ["toy"])


def test_weights_decide_where_both_sides_know_them(tmp_path):
    fitted = fit_calibration(synthetic_rounds(600, (1.5,), drafter="dspark", seed=1), resamples=100)
    (tmp_path / "model.safetensors").write_bytes(b"w")
    known = options.weights_hash(replace(fitted, provenance=replace(fitted.provenance, drafter_hash="x")),
                                 f"mine={tmp_path}")  # fmt: skip
    same = replace(fitted, provenance=replace(fitted.provenance, drafter_hash=known))
    other = replace(fitted, provenance=replace(fitted.provenance, drafter_hash="0" * 64))
    assert options.fits(same, f"mine={tmp_path}") and not options.fits(other, f"mine={tmp_path}")
    # without a hash the name decides
    assert options.fits(fitted, f"dspark={tmp_path}") and not options.fits(fitted, f"mine={tmp_path}")
