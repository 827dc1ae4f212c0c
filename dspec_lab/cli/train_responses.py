"""`dspec train responses`: prompts answered by the target, as the Parquet files that drafters are trained on."""

from __future__ import annotations

import argparse
from typing import Any

from dspec_lab.cli.output import add_json_option, check_json_target, text_console, write_result


def add_parser(subparsers: Any) -> None:
    """Add the parser to those of `dspec train`."""
    parser = subparsers.add_parser(
        "responses",
        help="have the target answer prompts, to train on",
        description="Answer prompts in batches into a Parquet file. The same command given again goes on where an "
        "interrupted one stopped. Sources: math, code, chat, contest, tasks (own generators); self, self-math, "
        "self-code, self-chat (the target writes the prompt); FILE.jsonl or DOMAIN=FILE.jsonl with turns; "
        "hf:NAME:COLUMN[:SPLIT].",
    )
    parser.add_argument("--prompts", nargs="+", required=True, metavar="SOURCE", help="where prompts come from")
    parser.add_argument("--count", type=int, default=500, help="prompts of each source, at most (default: 500)")
    parser.add_argument("--out", required=True, metavar="FILE", help="the Parquet file to make")
    parser.add_argument("--temperatures", default="0,0,0.7,1", help="taken by turns (default: 0,0,0.7,1)")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="longer answers are cut (default: 256)")
    parser.add_argument("--max-prompt", type=int, default=512, help="longer prompts are left out (default: 512)")
    parser.add_argument("--batch", type=int, default=64, help="answers side by side in a worker (default: 64)")
    parser.add_argument("--workers", type=int, help="processes of one thread (default: one per core, 1 on a GPU)")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and answers (default: 0)")
    parser.add_argument("--target", default="smollm2", help="smollm2 (default) or a model folder")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--dtype", default="fp32", help="of the target's weights: fp32 (default) or bf16")
    parser.add_argument(
        "--features", metavar="LAYERS", help="also keep the target's features for training: layer ids, as 1,8,14,21,27"
    )
    parser.add_argument("--cache", metavar="FOLDER", help="where features go (default: as `dspec train DRAFTER`)")
    parser.add_argument("--prompts-only", action="store_true", help="only gather the prompts, into OUT.parts")
    add_json_option(parser)
    parser.set_defaults(train=run)


def run(args: argparse.Namespace) -> int:
    """Gather the prompts (once), answer them, join the parts."""
    import time
    from pathlib import Path

    from dspec_lab.bench.record import run_record, usable_cores
    from dspec_lab.cli.eval import temperatures
    from dspec_lab.training.produce import ResponseConfig, join_parts, parts_folder
    from dspec_lab.training.prompts.sources import check_source, read_prompts
    from dspec_lab.training.responses import count_tokens
    from dspec_lab.training.workers import produce_side_by_side

    check_json_target(args.json)
    for name in args.prompts:
        check_source(name)
    if args.count < 1:
        raise ValueError(f"count must be at least 1, got {args.count}")
    config = ResponseConfig(
        temperatures=tuple(temperatures(args.temperatures)),
        max_new_tokens=args.max_new_tokens,
        max_prompt=args.max_prompt,
        num_slots=args.batch,
        seed=args.seed,
    )
    workers = args.workers
    if workers is None:
        workers = usable_cores() if args.device == "cpu" else 1
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    out = Path(args.out)
    if out.suffix != ".parquet":
        raise ValueError(f"--out must name a .parquet file, got {args.out!r}")
    features = feature_layers(args)
    folder = target_folder(args.target)
    console = text_console(args.json)
    prompts_file = gather_once(args, parts_folder(out), folder, console)
    if args.prompts_only:
        console.print(f"{len(read_prompts(prompts_file))} prompts in {prompts_file}", markup=False)
        return 0
    started = time.perf_counter()
    with ResponsesProgress() as progress:
        tokens = produce_side_by_side(
            prompts_file, folder, config, out, workers, device=args.device, dtype=args.dtype, features=features,
            on_progress=progress,
        )  # fmt: skip
    seconds = time.perf_counter() - started
    responses = join_parts(out, vocabulary(folder))
    counts = count_tokens(responses)
    parts = ", ".join(f"{domain} {count}" for domain, count in counts.items())
    console.print(f"{len(responses)} answers, {sum(counts.values())} tokens ({parts}) in {out}", markup=False)
    if tokens:
        console.print(f"{tokens} tokens in {seconds:.0f} s: {tokens / seconds:.0f} tok/s", markup=False)
    settings = {key: value for key, value in vars(args).items() if key not in ("run", "train", "verb", "what", "debug")}
    record = run_record({**settings, "workers": workers}, args.seed, dtype=args.dtype, model=folder.name)
    result = {"answers": len(responses), "tokens_by_domain": counts, "new_tokens": tokens, "seconds": seconds}
    write_result(args.json, {**result, "run": record})
    return 0


def feature_layers(args: argparse.Namespace) -> Any:
    """(folder, layers) of --features, or None."""
    from pathlib import Path

    from dspec_lab.core.files import cache_dir

    if args.features is None:
        return None
    try:
        layers = tuple(int(part) for part in args.features.split(","))
    except ValueError:
        raise ValueError(f"--features must be layer ids separated by commas, got {args.features!r}") from None
    return (cache_dir() / "features" if args.cache is None else Path(args.cache), layers)


def target_folder(name: str) -> Any:
    """The folder of the target; the default model is fetched if need be."""
    from pathlib import Path

    from dspec_lab.models.fetch import ensure_smollm2

    folder = ensure_smollm2() if name == "smollm2" else Path(name).expanduser()
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{name} is not a model folder: it has no config.json")
    return folder


def vocabulary(folder: Any) -> int:
    """Vocabulary size of the model in `folder`."""
    from dspec_lab.core.files import read_json
    from dspec_lab.models.family import model_spec

    return model_spec(read_json(folder / "config.json")).vocab_size


def gather_once(args: argparse.Namespace, parts: Any, folder: Any, console: Any) -> Any:
    """The file of prompts beside the parts. It is made once; another request for the same output is refused."""
    from dspec_lab.core.files import read_json, write_json
    from dspec_lab.training.prompts.sources import gather, needs_target, write_prompts

    asked = {"prompts": args.prompts, "count": args.count, "seed": args.seed, "target": folder.name}
    prompts_file, request = parts / "prompts.jsonl", parts / "request.json"
    if request.is_file():
        if read_json(request) != asked:
            raise ValueError(f"{parts} belongs to {read_json(request)}, not to {asked}; remove it or name another file")
        return prompts_file
    target = tokenizer = None
    if needs_target(args.prompts):
        from dspec_lab.models.decoder import LeanDecoder
        from dspec_lab.models.load import load_tokenizer, parse_dtype

        target = LeanDecoder.from_folder(folder, dtype=parse_dtype(args.dtype, args.device), device=args.device)
        tokenizer = load_tokenizer(folder)

    def say(name: str, found: int) -> None:
        console.print(f"{found} prompts from {name}", markup=False)

    prompts = gather(args.prompts, args.count, args.seed, target, tokenizer, say)
    write_prompts(prompts_file, prompts)
    write_json(request, asked)
    return prompts_file


class ResponsesProgress:
    """A bar of answers with tokens per second, on standard error; a line at each tenth where there is no terminal."""

    def __init__(self) -> None:
        import time

        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._bar = Progress(
            TextColumn("answers"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"),
            TimeRemainingColumn(), console=self._console,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=None)
        self._started, self._tenth = time.monotonic(), -1

    def __enter__(self) -> ResponsesProgress:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._bar.stop()

    def __call__(self, done: int, total: int, tokens: int) -> None:
        import time

        rate = f"{tokens / max(time.monotonic() - self._started, 1e-9):.0f} tok/s"
        self._bar.update(self._task, completed=done, total=total, description=rate)
        tenth = 10 * done // max(total, 1)
        if not self._console.is_terminal and tenth != self._tenth:
            self._tenth = tenth
            self._console.print(f"answers: {done} of {total}, {rate}", markup=False)
