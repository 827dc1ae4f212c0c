"""Check of ragged batches: each request's text is the one it has alone, whatever its neighbours, token for token."""

from __future__ import annotations

import time

from dspec_lab.config import VERIFICATIONS, DecodeConfig
from dspec_lab.models.decoder import LeanDecoder
from dspec_lab.verifier.audit_report import AuditRow, Seen
from dspec_lab.verifier.decode import generate
from dspec_lab.verifier.exact_audit import seen_in
from dspec_lab.verifier.ragged import BatchRequest, generate_batch
from dspec_lab.verifier.tiny import NEURAL_DRAFTERS, tiny_decoder

REQUESTS = 16
ACTIVE = 5  # fewer than there are: they join and leave between rounds


def mixed_requests(target: LeanDecoder, *, seed: int) -> list[BatchRequest]:
    """Requests that differ in prompt, drafter, draft length, temperature, filter, rule, length and seed."""
    drafters = [make(target) for make in NEURAL_DRAFTERS.values()]
    return [
        BatchRequest(
            request_id=f"audit {i}",
            prompt_ids=tuple((i + j * j) % target.vocab_size for j in range(1 + i % 7)),
            config=DecodeConfig(
                gamma=1 + i % 3, temperature=(1.0, 0.0, 0.7)[i % 3], top_k=(0, 2)[i // 3 % 2],
                max_new_tokens=8 + i % 5, verification=VERIFICATIONS[i // 2 % 2], seed=seed + i // 2,
            ),
            # two in a row share a drafter, so that block drafters draft for both in one pass
            drafter=drafters[i // 2 % len(drafters)],
        )
        for i in range(REQUESTS)
    ]  # fmt: skip


def ragged_row(*, seed: int) -> AuditRow:
    """Mixed requests in one ragged batch against each of them alone, on a random fp32 decoder."""
    start, target, seen = time.perf_counter(), tiny_decoder(), Seen()
    requests = mixed_requests(target, seed=seed)
    together = generate_batch(target, requests, max_active=ACTIVE)
    changed = []
    for wanted in requests:
        alone = generate(target, wanted.drafter, wanted.prompt_ids, wanted.config, request_id=wanted.request_id)
        seen += seen_in(alone)
        if alone.token_ids != together[wanted.request_id].token_ids:
            changed.append(wanted.request_id)
    return AuditRow(
        check="neighbours change nothing",
        subject="all neural drafters",
        settings=f"random decoder, ragged batch of {ACTIVE}, T=0, 0.7 and 1, fp32",
        verdict="FAIL" if changed else "inconclusive" if seen.missing else "pass",
        evidence=f"{len(changed)} of {REQUESTS} texts differ from those of single requests",
        value=float(len(changed)),
        limit=0.0,
        seen=seen,
        details={"changed": changed},
        wall_s=time.perf_counter() - start,
    )
