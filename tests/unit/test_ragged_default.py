"""Sixteen mixed requests on the default target: the batch gives each what it gets alone, token for token, in fp32."""

from __future__ import annotations

import torch

from dspec_lab.config import DecodeConfig
from dspec_lab.evaluation.drafters import TRAINED, available, build_drafters
from dspec_lab.evaluation.prompts import load_prompts
from dspec_lab.models.decoder import LeanDecoder
from dspec_lab.verifier.decode import encode_chat, generate
from dspec_lab.verifier.ragged import BatchRequest, generate_batch


def test_sixteen_mixed_requests_equal_sixteen_single_runs(default_model_dir):
    from dspec_lab.models.load import load_tokenizer

    target = LeanDecoder.from_folder(default_model_dir, dtype=torch.float32)
    tokenizer = load_tokenizer("smollm2")
    names = [name for name in available() if name != "autoregressive"]
    assert set(TRAINED) & set(names), "the trained drafters are what this is about"
    made = build_drafters(names, target)
    prompts = load_prompts("all", 9)
    wanted = []
    for i in range(16):
        drafter = None if i == 15 else made[names[i % len(names)]]
        config = DecodeConfig(
            gamma=min(1 + i % 7, getattr(drafter, "max_gamma", None) or 7),
            max_new_tokens=5 + i % 6,
            temperature=(0.0, 0.7, 1.0)[i % 3],
            top_k=(0, 40)[i % 2],
            top_p=(1.0, 0.9)[i // 8],
            verification=("token", "block")[i % 4 == 3],
            seed=i,
        )
        ids = encode_chat(tokenizer, prompts[i % 9].turns[:1])
        wanted.append(BatchRequest(request_id=str(i), prompt_ids=tuple(ids), config=config, drafter=drafter))
    # eleven places: requests join while others run
    together = generate_batch(target, wanted, max_active=11)
    drafted = accepted = 0
    for request in wanted:
        alone = generate(target, request.drafter, request.prompt_ids, request.config, request_id=request.request_id)
        batch = together[request.request_id]
        assert batch.token_ids == alone.token_ids, request.request_id
        assert [r.draft_ids for r in batch.rounds] == [r.draft_ids for r in alone.rounds], request.request_id
        drafted, accepted = drafted + batch.num_proposed, accepted + batch.num_accepted
    # with no proposals, no acceptances or no rejections this would show nothing
    assert 0 < accepted < drafted
