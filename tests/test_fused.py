"""What the engine fuses is shipped together: half a group would leave uninitialised memory in the server."""

from __future__ import annotations

import pytest

from weightferry.shared.fused import close_under_fusion, fused_group

LAYER = "model.layers.3"


@pytest.mark.parametrize(
    ("changed", "also"),
    [
        (
            "self_attn.q_proj.weight",
            ["self_attn.k_proj.weight", "self_attn.v_proj.weight", "self_attn.v_proj.bias"],
        ),
        ("mlp.up_proj.weight", ["mlp.gate_proj.weight"]),
        ("self_attn.o_proj.weight", ["self_attn.o_proj.bias"]),
        (
            "mlp.experts.7.down_proj.weight",
            ["mlp.experts.0.gate_proj.weight", "mlp.experts.1.up_proj.weight"],
        ),
        ("block_sparse_moe.experts.1.w1.weight", ["block_sparse_moe.experts.0.w2.weight"]),
        ("mlp.experts.gate_up_proj", ["mlp.experts.down_proj_bias"]),
    ],
)
def test_a_change_takes_its_whole_group_along(changed, also):
    others = ["self_attn.q_norm.weight", "input_layernorm.weight", "mlp.gate.weight"]
    names = [f"{LAYER}.{name}" for name in (changed, *also, *others)]
    closed = close_under_fusion([f"{LAYER}.{changed}"], names)
    assert closed == {f"{LAYER}.{name}" for name in (changed, *also)}


def test_layers_and_stacks_do_not_share_groups():
    names = ["model.layers.0.self_attn.q_proj.weight", "model.layers.1.self_attn.q_proj.weight"]
    names += ["visual.blocks.0.attn.q_proj.weight", "lm_head.weight", "model.embed_tokens.weight"]
    assert len({fused_group(name) for name in names}) == len(names)
