"""Skeletons: large values stay in the file, and everything comes back as it was."""

import os

import numpy as np
import onnx
import pytest
from onnx import helper
from weighted_models import constant, initializer, model, node, save, typed, value, weights

from ort_delayed.graphs import iter_graphs, iter_nodes
from ort_delayed.skeletons import LIFTED_BYTES, FileRange, NotAModelError, Skeleton

LARGE = LIFTED_BYTES // 4


def rich_model() -> onnx.ModelProto:
    """Large and small values in every place that a skeleton walks through, and fields that it does not know."""
    branch = helper.make_graph(
        [constant("c", weights(LARGE, seed=3)), node("Add", ["x", "c"], ["b"])],
        "branch",
        [],
        [value("b", [LARGE])],
        [initializer("w", weights(LARGE, seed=4)), initializer("small", weights(3))],
    )
    function = helper.make_function(
        "local",
        "F",
        ["x"],
        ["y"],
        [constant("c", weights(LARGE, seed=5)), node("Add", ["x", "c"], ["y"])],
        [helper.make_opsetid("", 17)],
    )
    nodes = [
        node("If", ["cond"], ["y"], then_branch=branch, else_branch=branch),
        constant("lists", weights(3), name="small"),
        node("Constant", [], ["ints"], value_ints=list(range(LARGE))),
        node("F", ["x"], ["z"], domain="local"),
    ]
    values = [initializer("raw", weights(LARGE)), typed("floats", weights(LARGE)), initializer("s", weights(2))]
    values += [typed("doubles", weights(LARGE, dtype=np.float64)), typed("int8", weights(LARGE, dtype=np.int8))]
    made = model(nodes, [value("x", [LARGE])], [value("y", [LARGE])], values, [function])
    made.metadata_props.add(key="note", value="n" * 100_000)
    made.graph.doc_string = "d" * 100_000
    # A field that this version of ONNX does not know, in the model and in a tensor.
    unknown = helper.make_tensor("u", 1, [1], [1.0]).SerializeToString() + b"\xfa\x3e\x03abc"
    made.graph.initializer.add().ParseFromString(unknown)
    return onnx.ModelProto.FromString(made.SerializeToString() + b"\xfa\x3e\x03xyz")


def joined(skeleton: Skeleton) -> bytes:
    parts = []
    for piece in skeleton.pieces():
        parts.append(os.pread(skeleton.fd, piece.nbytes, piece.offset) if isinstance(piece, FileRange) else piece)
    return b"".join(parts)


def test_an_untouched_skeleton_comes_back_as_the_model_it_was(tmp_path):
    made = rich_model()
    path = save(made, tmp_path / "m.onnx")
    with Skeleton(path) as skeleton:
        assert onnx.ModelProto.FromString(joined(skeleton)) == made
        assert joined(skeleton).count(b"\xfa\x3e\x03xyz") == joined(skeleton).count(b"\xfa\x3e\x03abc") == 1


def test_large_values_stay_in_the_file_and_small_ones_in_the_proto(tmp_path):
    with Skeleton(save(rich_model(), tmp_path / "m.onnx")) as skeleton:
        tensors = {t.name: t for t in skeleton.model.graph.initializer}
        assert {n for n, t in tensors.items() if skeleton.lifted(t)} == {"raw", "floats", "doubles"}
        inner = [t for g in list(iter_graphs(skeleton.model.graph))[1:] for t in g.initializer if skeleton.lifted(t)]
        constants = [n for n in iter_nodes(skeleton.model.graph.node) if n.output[0] == "c"]
        assert [t.name for t in inner] == ["w", "w"]
        assert all(skeleton.lifted(n.attribute[0].t) for n in constants)
        assert skeleton.lifted(skeleton.model.functions[0].node[0].attribute[0].t)
        found = skeleton.lifted(tensors["floats"])
        assert found is not None
        assert os.pread(skeleton.fd, found.range.nbytes, found.range.offset) == weights(LARGE).tobytes()


def test_a_tensor_with_values_in_two_fields_is_left_to_the_parser(tmp_path):
    tensor = initializer("w", weights(LARGE))
    tensor.float_data.extend([1.0])
    with Skeleton(save(model([], [], [], [tensor]), tmp_path / "m.onnx")) as skeleton:
        assert skeleton.lifted(skeleton.model.graph.initializer[0]) is None
        assert skeleton.model.graph.initializer[0] == tensor


def test_an_external_tensor_keeps_its_entries(tmp_path):
    tensor = initializer("w", weights(LARGE))
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="w.bin")
    with Skeleton(save(model([], [], [], [tensor]), tmp_path / "m.onnx")) as skeleton:
        assert skeleton.model.graph.initializer[0] == tensor


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00",
        b"garbage that is no model",
        b"\x3a\xff\xff\xff\xff\x0f",
        b"\x18\x00\x00\x00ORTM12345678",
        b"\x3b\x3c",
    ],
    ids=["empty", "zero", "text", "cut short", "ORT format", "groups"],
)
def test_what_is_no_model_is_refused_by_name(tmp_path, content):
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    with pytest.raises(NotAModelError, match=r"m\.onnx' is (not an ONNX model|a model in ORT format)"):
        Skeleton(path)


def test_every_truncation_of_a_model_is_refused_or_is_a_model(tmp_path):
    whole = model(
        [node("Add", ["x", "w"], ["y"])], [value("x", [3])], [value("y", [3])], [initializer("w", weights(3))]
    )
    data, path, refused = whole.SerializeToString(), tmp_path / "m.onnx", 0
    for length in range(len(data)):
        path.write_bytes(data[:length])
        try:
            Skeleton(path).close()
        except NotAModelError:
            refused += 1
        else:
            assert onnx.ModelProto.FromString(data[:length]).HasField("graph")
    assert refused > len(data) // 2


@pytest.mark.parametrize("depth", [34, 400, 5000])
def test_bodies_in_bodies_beyond_what_protobuf_reads(tmp_path, depth):
    def delimited(number: int, content: bytes) -> bytes:
        size, head = len(content), bytearray([number << 3 | 2])
        while size >= 128:
            head.append(size & 127 | 128)
            size >>= 7
        return bytes([*head, size]) + content

    # A graph (model 7, attribute 6) holds a node (1), which holds an attribute (5).
    wire = delimited(5, delimited(9, bytes(LIFTED_BYTES)))
    for _ in range(depth):
        wire = delimited(1, delimited(5, delimited(6, wire)))
    (tmp_path / "m.onnx").write_bytes(delimited(7, wire))
    with pytest.raises(NotAModelError, match=r"is not an ONNX model"):
        Skeleton(tmp_path / "m.onnx")


def test_a_file_that_changes_while_it_is_open_is_noticed(tmp_path):
    path = save(rich_model(), tmp_path / "m.onnx")
    with Skeleton(path) as skeleton:
        skeleton.check_unchanged()
        with path.open("ab") as file:
            file.write(b"x")
        with pytest.raises(RuntimeError, match=r"m\.onnx' was changed"):
            skeleton.check_unchanged()


def test_a_model_that_would_pass_2_gib_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("ort_delayed.skeletons._LARGEST_MESSAGE", LIFTED_BYTES)
    with (
        Skeleton(save(rich_model(), tmp_path / "m.onnx")) as skeleton,
        pytest.raises(ValueError, match="can hold at most 65536"),
    ):
        skeleton.pieces()
