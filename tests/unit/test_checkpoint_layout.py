"""Reading and writing drafter checkpoints: what is written comes back, and what is wrong is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspec_lab.checkpoints.fields import read_architecture, write_fields
from dspec_lab.checkpoints.layout import (
    build_model,
    fuse_projections,
    load_drafter,
    read_config,
    read_tensors,
    split_projections,
    tensor_shapes,
    write_checkpoint,
)
from dspec_lab.drafters.architecture import BlockArchitecture, ChainArchitecture, MedusaArchitecture
from dspec_lab.models.family import model_spec

VECTORS = Path(__file__).parents[1] / "parity" / "vectors"
SMALL = sorted(path for path in VECTORS.iterdir() if path.name.startswith(("dspark_", "dflash_", "eagle3_")))
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 24,
    "intermediate_size": 40,
    "vocab_size": 61,
    "max_position_embeddings": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
}


def architectures():
    spec = model_spec(LLAMA)
    shared = {"spec": spec, "num_target_layers": 6}
    return {
        "dspark": BlockArchitecture(
            **shared,
            target_hidden_size=24,
            target_layer_ids=(-1, 2, 4),
            block_size=5,
            mask_token_id=7,
            markov_rank=3,
            markov_head_type="gated",
            confidence_head=True,
            confidence_with_markov=True,
            draft_vocab_size=20,
            context_window=9,
        ),
        "dflash": BlockArchitecture(
            **shared,
            target_hidden_size=24,
            target_layer_ids=(0,),
            block_size=4,
            mask_token_id=0,
            sample_from_anchor=False,
        ),
        "eagle3": ChainArchitecture(
            kind="eagle3",
            **shared,
            target_hidden_size=24,
            target_layer_ids=(0, 2, 4),
            ttt_length=3,
            draft_vocab_size=30,
        ),
        "mtp": ChainArchitecture(kind="mtp", **shared, target_hidden_size=24, ttt_length=2, step_loss_decay=0.5),
        "medusa": MedusaArchitecture(**shared, medusa_num_heads=3, draft_vocab_size=11),
    }


class Borrowed:
    """The part of a target that drafters share."""

    def __init__(self):
        generator = torch.Generator().manual_seed(5)
        self.table = torch.randn(61, 24, generator=generator)
        self.matrix = torch.randn(61, 24, generator=generator)

    def embedding(self):
        return self.table

    def head(self):
        return self.matrix


def random_model(arch, **own):
    torch.manual_seed(1)
    model = build_model(arch, **own)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    if model.d2t is not None:
        model.keep_tokens(torch.randperm(61)[: model.draft_vocab_size].sort().values)
    return model.requires_grad_(False)


@pytest.mark.parametrize("kind", list(architectures()))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_written_and_read_back(tmp_path, kind, dtype):
    arch, target = architectures()[kind], Borrowed()
    model = random_model(arch)
    write_checkpoint(tmp_path / kind, model, LLAMA, dtype=dtype, extra_fields={"target_model_name_or_path": "tiny"})
    loaded = load_drafter(tmp_path / kind, target)
    assert loaded.model.arch == arch and loaded.config["target_model_name_or_path"] == "tiny"
    names = set(read_tensors(tmp_path / kind))
    assert "embed_tokens.weight" not in names and "lm_head.weight" not in names
    assert set(tensor_shapes(model)) == names - {"t2d"}
    for name, tensor in loaded.model.state_dict().items():
        matrix = tensor.dim() > 1 and not name.startswith("confidence_head.")
        expected = model.state_dict()[name]
        assert tensor.dtype == (dtype if matrix else expected.dtype)
        assert torch.equal(tensor, expected.to(tensor.dtype))
    if arch.draft_vocab_size:
        kept = read_tensors(tmp_path / kind)["t2d"]
        assert torch.equal(kept.nonzero()[:, 0], loaded.model.target_ids_W)


@pytest.mark.parametrize("folder", SMALL, ids=lambda path: path.name)
def test_reference_checkpoint_survives_bit_for_bit(tmp_path, folder):
    loaded = load_drafter(folder / "checkpoint")
    write_checkpoint(tmp_path / "again", loaded.model, loaded.config)
    before, after = read_tensors(folder / "checkpoint"), read_tensors(tmp_path / "again")
    assert set(before) == set(after)
    assert all(torch.equal(before[name], after[name]) for name in before)
    config = read_config(tmp_path / "again")
    for name, value in loaded.config.items():
        assert config[name] == value, name


def test_copies_of_shared_weights_on_request(tmp_path):
    target, model = Borrowed(), random_model(architectures()["dflash"])
    model.share(embedding=target.embedding, head=target.head)
    write_checkpoint(tmp_path / "full", model, LLAMA, copy_shared=True)
    tensors = read_tensors(tmp_path / "full")
    assert torch.equal(tensors["embed_tokens.weight"], target.table)
    assert torch.equal(tensors["lm_head.weight"], target.matrix)
    assert load_drafter(tmp_path / "full").model.lm_head is not None  # needs no target


def test_missing_embedding_needs_a_target(tmp_path):
    write_checkpoint(tmp_path / "d", random_model(architectures()["dflash"]), LLAMA)
    with pytest.raises(ValueError, match="no embed_tokens.weight and no lm_head.weight; pass the target"):
        load_drafter(tmp_path / "d")


def test_shared_weights_are_looked_up_each_time():
    target, model = Borrowed(), random_model(architectures()["dspark"])
    model.share(embedding=target.embedding, head=target.head)
    hidden, ids = torch.randn(3, 24), torch.tensor([4, 9])
    before = model.head_logits(hidden)
    assert torch.equal(before, hidden @ target.matrix[model.target_ids_W].T)
    # replaced, then written to in place: neither may leave a stale copy of the kept rows
    target.table, target.matrix = target.table + 1, target.matrix + 1
    assert torch.equal(model.embed(ids), target.table[ids])
    assert torch.equal(model.head_logits(hidden), hidden @ target.matrix[model.target_ids_W].T)
    target.matrix.mul_(2)
    assert torch.equal(model.head_logits(hidden), hidden @ target.matrix[model.target_ids_W].T)


def damaged(tmp_path, change):
    folder = tmp_path / "damaged"
    shutil.copytree(VECTORS / "dspark_gemma4_vanilla_conf" / "checkpoint", folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_names_and_shapes_are_reported_together(tmp_path):
    def change(tensors):
        tensors["layers.0.self_attn.q_projection.weight"] = tensors.pop("layers.0.self_attn.q_proj.weight")
        tensors["fc.weight"] = tensors["fc.weight"][:, :-1].contiguous()
        tensors["mtp.something_else"] = torch.ones(3)

    with pytest.raises(ValueError) as error:
        load_drafter(damaged(tmp_path, change))
    text = str(error.value)
    assert "missing layers.0.self_attn.q_proj.weight (is it layers.0.self_attn.q_projection.weight?)" in text
    assert "unexpected mtp.something_else" in text
    assert "fc.weight has shape (32, 63), expected (32, 64)" in text


def test_file_that_is_bf16_throughout(tmp_path):
    """As published ones are: norms, biases and the confidence head are widened, matrices stay as they are."""

    def change(tensors):
        for name in tensors:
            tensors[name] = tensors[name].bfloat16()

    model = load_drafter(damaged(tmp_path, change)).model
    assert model.fc.weight.dtype == model.lm_head.weight.dtype == torch.bfloat16
    assert model.norm.weight.dtype == model.layers[0].layer_scalar.dtype == torch.float32
    assert model.confidence_head.proj.weight.dtype == torch.float32
    exact = load_drafter(VECTORS / "dspark_gemma4_vanilla_conf" / "checkpoint").model
    with torch.inference_mode():
        got, want = (m.head_logits(m.block_hidden(m.new_cache(8), 3)) for m in (model, exact))
    assert got.dtype == torch.float32
    assert (got - want).abs().max() < 0.1 * want.abs().max()


def test_truncated_file_is_one_clear_error(tmp_path):
    folder = damaged(tmp_path, lambda tensors: None)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-100])
    with pytest.raises(ValueError, match="not a complete safetensors file"):
        load_drafter(folder)
    with pytest.raises(FileNotFoundError, match="no config.json"):
        load_drafter(tmp_path)


def test_projections_split_and_fuse():
    model = random_model(architectures()["eagle3"])
    state = {name: p for name, p in model.named_parameters()}
    parts = split_projections(state, model)
    assert parts["layers.0.self_attn.k_proj.weight"].shape == (12, 48)
    fused = fuse_projections(parts)
    assert set(fused) == set(state) and all(torch.equal(fused[name], state[name]) for name in state)


def fields(**changes):
    config = write_fields(architectures()["dspark"], LLAMA, "float32")
    config |= changes
    return {name: value for name, value in config.items() if value != "absent"}


def test_engine_fields_are_written_and_agree():
    config = fields()
    assert config["architectures"] == ["LlamaDSparkModel"]
    assert config["sample_from_anchor"] is True
    assert config["target_layer_ids"] == [-1, 2, 4] and config["eagle_aux_hidden_state_layer_ids"] == [0, 3, 5]
    assert config["draft_vocab_size"] == 20 and config["vocab_size"] == 61 and config["target_hidden_size"] == 24
    assert json.loads(json.dumps(config)) == config
    assert read_architecture(config) == architectures()["dspark"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["Qwen3DSparkModel"]}, "does not fit model_type 'llama'"),
        ({"architectures": ["LlamaForCausalLM"]}, "'LlamaForCausalLM' is not known"),
        ({"model_type": "mamba"}, "model_type 'mamba' is not supported"),
        ({"target_layer_ids": "absent"}, "target_layer_ids must be a list"),
        ({"target_layer_ids": [2, 2], "eagle_aux_hidden_state_layer_ids": "absent"}, "must rise strictly"),
        ({"target_layer_ids": [0, 5], "eagle_aux_hidden_state_layer_ids": "absent"}, "layer id 5 is out of range"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 2, 4]}, "is not target_layer_ids"),
        ({"mask_token_id": 61}, "mask_token_id 61 is outside"),
        ({"markov_head_type": "absent"}, "markov_head_type must be one of"),
        ({"markov_head_type": "lstm"}, "markov_head_type must be one of .* got 'lstm'"),
        ({"enable_confidence_head": "yes"}, "enable_confidence_head must be true or false"),
        ({"query_zero_predicts_next": False}, "anchor layout is contradictory"),
        ({"dflash_config": {"block_size": 6}}, "block_size has different values"),
        ({"draft_vocab_size": 62}, "draft_vocab_size 62 does not fit"),
        ({"rope_theta": "absent"}, "no rope_theta"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'"),
    ],
)
def test_bad_fields_are_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        read_architecture(fields(**changes))


def test_extra_field_may_not_contradict(tmp_path):
    with pytest.raises(ValueError, match="extra field block_size = 9 contradicts"):
        write_checkpoint(tmp_path / "d", random_model(architectures()["dspark"]), LLAMA, extra_fields={"block_size": 9})


def test_gemma4_fields_of_newer_transformers_become_flat():
    """transformers 5.24 hides two fields in per_layer_config; a written config has them flat again."""
    config = read_config(VECTORS / "dspark_gemma4_vanilla_conf" / "checkpoint")
    flat = {name: config.pop(name) for name in ("global_head_dim", "num_global_key_value_heads")}
    config["per_layer_config"] = {
        str(layer): {"head_dim": flat["global_head_dim"], "num_key_value_heads": flat["num_global_key_value_heads"]}
        for layer in range(2)
    }
    arch = read_architecture(config)
    assert arch.spec.attention["full_attention"].head_dim == 16
    assert arch.spec.attention["full_attention"].num_kv_heads == 1
    written = write_fields(arch, config, "float32")
    assert "per_layer_config" not in written
    assert {name: written[name] for name in flat} == flat
    assert written["target_model_type"] == "gemma4" and written["target_text_model_type"] == "gemma4_text"
    assert read_architecture(written) == arch
    del config["target_model_type"], config["target_text_model_type"]
    nested = write_fields(arch, {"model_type": "gemma4", "text_config": config}, "float32")
    assert nested["target_model_type"] == "gemma4" and nested["model_type"] == "gemma4_text"
