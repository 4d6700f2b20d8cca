"""From names to groups: which group, in which order, independent of everything but the names."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from ort_delayed.loader.element_types import ELEMENT_TYPES
from ort_delayed.loader.layers import group_names, group_tensors, natural_key
from ort_delayed.loader.tensor_on_disk import TensorOnDisk

FLOAT32 = ELEMENT_TYPES[0]

BERT = [
    "bert.embeddings.word_embeddings.weight",
    "bert.embeddings.LayerNorm.bias",
    *(f"bert.encoder.layer.{i}.output.dense.{p}" for i in (0, 1, 2, 10) for p in ("bias", "weight")),
    "bert.pooler.dense.bias",
    "bert.pooler.dense.weight",
    "classifier.bias",
    "classifier.weight",
]


def groups_of(*names: str, n: int = 1) -> list[str]:
    return [name for name, _ in group_names(names, n)]


def test_a_classifier_loads_from_embeddings_to_head() -> None:
    assert groups_of(*BERT) == [
        "embeddings",
        "layer-0000",
        "layer-0001",
        "layer-0002",
        "layer-0010",
        "bert.pooler.dense",
        "classifier",
    ]


@pytest.mark.parametrize(
    "stack",
    [
        "encoder.layer",
        "layers",
        "model.layers",
        "language_model.model.layers",
        "h",
        "transformer.h",
        "block",
        "blocks",
        "decoder.layers",
        "model.decoder.layers",
        "vit.Encoder.Layer",
        "/model/layers",
    ],
)
def test_numbered_layers_of_one_stack(stack: str) -> None:
    assert group_names([f"{stack}.{i}.w" for i in (10, 9, 0)]) == (
        ("layer-0000", (f"{stack}.0.w",)),
        ("layer-0009", (f"{stack}.9.w",)),
        ("layer-0010", (f"{stack}.10.w",)),
    )


def test_the_first_number_is_the_layers() -> None:
    assert groups_of("model.layers.3.block.7.w", "model.layers.3.experts.2.w1") == ["layer-0003"]


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "wte.weight",
        "transformer.wpe.weight",
        "shared.weight",
        "vit.embeddings.x",
        "pos_embed",
    ],
)
def test_embeddings_load_first(name: str) -> None:
    assert groups_of("a.weight", "layers.0.w", name) == ["embeddings", "layer-0000", "a"]


@pytest.mark.parametrize(
    "name",
    [
        "lm_head.weight",
        "classifier.2.weight",
        "my_classifier.bias",
        "classification_head.w",
        "score.weight",
        "head.bias",
    ]
    + [
        "qa_outputs.bias",
        "cls.predictions.bias",
        "embed_out.weight",
        "lm_head.embedding.weight",
        "classifier.layers.0.w",
    ],
)
def test_heads_load_last(name: str) -> None:
    assert groups_of(name, "layers.0.w", "z.weight") == ["layer-0000", "z", "classifier"]


def test_layers_below_a_module_named_after_its_task_stay_layers() -> None:
    assert groups_of("text_embedder.encoder.layer.1.w", "text_embedder.encoder.layer.0.w") == [
        "layer-0000",
        "layer-0001",
    ]
    assert groups_of("sequence_classifier.bert.encoder.layer.0.w") == ["layer-0000"]


def test_everything_else_keeps_its_modules_name() -> None:
    assert groups_of("norm.weight", "norm.bias", "bn.running_mean", "Final.Scale", "/a/b/MatMul_W", "weight") == [
        "a.b.MatMul_W",
        "bn",
        "Final.Scale",
        "norm",
        "weight",
    ]


def test_two_stacks_are_told_apart_encoder_first() -> None:
    names = ["decoder.block.0.w", "encoder.block.1.w", "encoder.block.0.w", "decoder.embed_tokens.weight"]
    assert groups_of(*names) == ["embeddings", "encoder-layer-0000", "encoder-layer-0001", "decoder-layer-0000"]


def test_the_first_side_in_a_path_is_its_side() -> None:
    assert groups_of("decoder.bert.encoder.layer.0.w", "encoder.encoder.layer.0.w") == [
        "encoder-layer-0000",
        "decoder-layer-0000",
    ]


def test_a_path_that_only_looks_shortened_is_another_stack() -> None:
    assert groups_of("decoder.bert.encoder.layer.0.w", "encoder.layer.0.w") == [
        "encoder-layer-0000",
        "decoder-layer-0000",
    ]


def test_other_stacks_are_told_apart_by_their_path() -> None:
    assert groups_of("text_model.encoder.layers.0.w", "vision_model.encoder.layers.0.w", "h.0.w") == [
        "text_model.encoder-layer-0000",
        "vision_model.encoder-layer-0000",
        "h-layer-0000",
    ]


def test_a_path_that_an_exporter_shortened_is_the_same_stack() -> None:
    assert groups_of("bert.encoder.layer.0.w", "/encoder/layer.0/Constant_1", "/encoder/layer.1/x") == [
        "layer-0000",
        "layer-0001",
    ]


@pytest.mark.parametrize(
    ("n", "expected"),
    [
        (2, ["embeddings..layer-0000", "layer-0001..layer-0002", "layer-0010..bert.pooler.dense", "classifier"]),
        (7, ["embeddings..classifier"]),
        (99, ["embeddings..classifier"]),
    ],
)
def test_consecutive_groups_of_any_kind_are_joined(n: int, expected: list[str]) -> None:
    joined = group_names(BERT, n)
    assert [name for name, _ in joined] == expected
    assert sorted(t for _, tensors in joined for t in tensors) == sorted(BERT)


def test_the_order_of_the_names_does_not_matter() -> None:
    rng = random.Random(3)
    expected = group_names(BERT, 2)
    for _ in range(20):
        shuffled = rng.sample(BERT, len(BERT))
        assert group_names(shuffled, 2) == expected


@pytest.mark.parametrize("seed", ["0", "1", "4711"])
def test_neither_hash_seed_nor_locale_matters(seed: str) -> None:
    names = [*BERT, "encoder2.layers.0.w", "Äpfel.weight", "\u0131x.weight", "I.weight"]
    script = f"from ort_delayed.loader.layers import group_names; print(group_names(set({names!r})))"
    environment = {**os.environ, "PYTHONHASHSEED": seed, "LC_ALL": "tr_TR.UTF-8", "PYTHONUTF8": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(group_names(names))


def test_natural_order() -> None:
    names = ["layer.10", "layer.2", "Layer.2", "layer.02", "layer", "layer.2.b", "x²", "x1", "x" + "9" * 5000]
    ordered = sorted(random.Random(1).sample(names, len(names)), key=natural_key)
    assert ordered == ["layer", "Layer.2", "layer.02", "layer.2", "layer.2.b", "layer.10", "x1", "x" + "9" * 5000, "x²"]


def test_a_number_of_more_digits_than_a_layer_has_is_a_name() -> None:
    assert groups_of("layers." + "1" * 10 + ".weight") == ["layers.1111111111"]


def test_groups_of_tensors() -> None:
    def tensor(name: str, path: str, size: int) -> TensorOnDisk:
        return TensorOnDisk(name, path, 0, size, (size // 4,), FLOAT32)

    tensors = [tensor("layers.0.b", "/m/2", 8), tensor("norm.weight", "/m/1", 16), tensor("layers.0.a", "/m/10", 4)]
    first, second = group_tensors(tensors)
    assert (first.spec.name, first.spec.tensor_names, first.spec.mapped_bytes) == (
        "layer-0000",
        ("layers.0.a", "layers.0.b"),
        12,
    )
    assert first.spec.source_files == (Path("/m/10"), Path("/m/2"))
    assert first.tensors == (tensors[2], tensors[0])
    assert second.spec.name == "norm"
    (joined,) = group_tensors(tensors, 2)
    assert joined.spec.mapped_bytes == 28


def test_no_tensors_no_groups() -> None:
    assert group_tensors([]) == ()
