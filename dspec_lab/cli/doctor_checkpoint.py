"""`dspec doctor CHECKPOINT`: what is wrong with a drafter's files, and whether it fits its target."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dspec_lab.cli.output import check_json_target, text_console, write_result

PROBE_PROMPTS, PROBE_TOKENS = 6, 48


def run(args: argparse.Namespace) -> int:
    """Print the findings; 1 when one of them is an error."""
    from dspec_lab.bench.record import run_record
    from dspec_lab.checkpoints.doctor import scan_checkpoint
    from dspec_lab.checkpoints.layout import read_config
    from dspec_lab.core.files import read_json
    from dspec_lab.models.fetch import default_model_folder

    check_json_target(args.json)
    folder = Path(args.checkpoint).expanduser()
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no checkpoint folder {folder}")
    config = read_config(folder)
    target_folder = default_model_folder() if args.target == "smollm2" else Path(args.target).expanduser()
    target_config = None
    if (target_folder / "config.json").is_file():
        target_config = read_json(target_folder / "config.json")
    elif args.target != "smollm2":
        raise FileNotFoundError(f"--target {args.target} is not a model folder: it has no config.json")
    console = text_console(args.json)
    findings = scan_checkpoint(folder, target_config)
    hits, note = None, ""
    if any(finding.severity == "error" for finding in findings):
        note = "not run on the target: mend the errors first"
    elif target_config is None:
        note = "not run on its target, which is not here (dspec fetch smollm2, or --target FOLDER)"
    elif args.no_probe:
        note = "not run on the target (--no-probe)"
    else:
        findings, hits, note = probe(folder, args.target, findings)
    for finding in findings:
        mark = "[bold red]error  [/]" if finding.severity == "error" else "[yellow]warning[/]"
        console.print(mark, end=" ")
        console.print(f"{finding.where}: {finding.message} ({finding.code})", markup=False)
    healthy = not any(finding.severity == "error" for finding in findings)
    kind = ", ".join(config.get("architectures") or ["no architecture"])
    verdict = "no error found" if healthy else "this checkpoint is faulty"
    console.print(f"{folder} ({kind}): {verdict}; {note}", markup=False)
    rows = [asdict(finding) for finding in findings]
    record = run_record({"checkpoint": str(folder), "target": args.target}, seed=None)
    write_result(args.json, {"healthy": healthy, "findings": rows, "first_proposals_right": hits, "run": record})
    return 0 if healthy else 1


def probe(folder: Path, target_name: str, findings: list[Any]) -> tuple[list[Any], float | None, str]:
    """(findings with the probe's, share of first proposals that are the target's choice, a note)."""
    import torch

    from dspec_lab.checkpoints.layout import load_drafter
    from dspec_lab.checkpoints.probe import probe_drafter, target_text
    from dspec_lab.drafters.medusa_model import MedusaDraftModel
    from dspec_lab.evaluation.prompts import load_prompts
    from dspec_lab.models.decoder import LeanDecoder
    from dspec_lab.models.load import load_target, load_tokenizer
    from dspec_lab.verifier.decode import encode_chat

    target, tokenizer = load_target(target_name, torch.float32), load_tokenizer(target_name)
    if not isinstance(target, LeanDecoder):
        return findings, None, "not run on the target, whose embedding and head cannot be borrowed"
    model = load_drafter(folder, target, dtype=torch.float32).model
    if isinstance(model, MedusaDraftModel):
        return findings, None, "not run on the target: the probe has no reading for medusa"
    prompts = [
        encode_chat(tokenizer, prompt.turns[:1])
        for domain in ("math", "code", "chat")
        for prompt in load_prompts(domain, PROBE_PROMPTS // 3)
    ]
    texts = [target_text(target, prompt, PROBE_TOKENS) for prompt in prompts]
    report = probe_drafter(model, target, texts, [len(prompt) for prompt in prompts])
    right = report.hits_by_slot_shift[0]
    note = f"{right:.0%} of {report.anchors} first proposals are the target's choice"
    return [*findings, *report.findings], right, note
