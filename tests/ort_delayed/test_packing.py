"""ort_delayed/packing.py: models packed and run, whole or not at all."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from packable_models import PACKABLE, Packable, delayed_copy, random, save_external
from subprocesses import run_snippet

import ort_delayed
from ort_delayed.loader.external_data import external_tensor, has_external_data
from ort_delayed.pack_manifest import read_manifest, verify_packed_model
from ort_delayed.pack_sessions import OPTIMIZATION_LEVELS
from ort_delayed.packing import pack_model
from ort_delayed.prepacked_entries import packed_weights
from ort_delayed.use_order import scoped_initializers

VERSION = tuple(int(part) for part in onnxruntime.__version__.split(".")[:2])
Outputs = list[np.ndarray]


def plain(path: Path, feeds: Mapping[str, np.ndarray], optimize: str = "all") -> Outputs:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = OPTIMIZATION_LEVELS[optimize]
    outputs: Outputs = onnxruntime.InferenceSession(str(path), options).run(None, dict(feeds))
    return outputs


def ours(path: Path, feeds: Mapping[str, np.ndarray]) -> Outputs:
    outputs: Outputs = ort_delayed.InferenceSession(path).run(None, dict(feeds))
    return outputs


def same_bytes(left: Outputs, right: Outputs) -> bool:
    return [a.tobytes() for a in left] == [b.tobytes() for b in right]


def loaded(path: Path) -> onnx.ModelProto:
    return onnx.load(str(path), load_external_data=False)


def files(directory: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in directory.iterdir() if p.is_file()}


@pytest.fixture
def chain() -> Packable:
    return PACKABLE["chain"]()


@pytest.mark.parametrize("optimize", OPTIMIZATION_LEVELS)
@pytest.mark.parametrize("name", PACKABLE)
def test_outputs_are_those_of_plain_onnxruntime_bit_for_bit(tmp_path: Path, name: str, optimize: str) -> None:
    made = PACKABLE[name]()
    source = save_external(made.model, tmp_path / "model.onnx")
    expected = plain(source, made.feeds, optimize)
    pack_model(source, tmp_path / "packed.onnx", optimize=optimize)
    os.remove(source)
    assert same_bytes(ours(tmp_path / "packed.onnx", made.feeds), expected)
    assert same_bytes(plain(tmp_path / "packed.onnx", made.feeds, "none"), expected)
    for again, first in zip(plain(tmp_path / "packed.onnx", made.feeds), expected, strict=True):
        np.testing.assert_allclose(again, first, rtol=1e-3, atol=1e-3)


@pytest.mark.skipif(VERSION < (1, 32), reason="1.23 writes bodies wrongly, and cannot save all that it packs")
@pytest.mark.parametrize("name", [n for n in PACKABLE if n not in ("small_only", "convolution")])
def test_pieces_give_the_same_packed_bytes_as_onnxruntime_packing_the_whole_model(tmp_path: Path, name: str) -> None:
    made = PACKABLE[name]()
    source = save_external(made.model, tmp_path / "model.onnx")
    pack_model(source, tmp_path / "packed.onnx")
    whole = tmp_path / "whole"
    whole.mkdir()
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(whole / "whole.onnx")
    options.add_session_config_entry("session.optimized_model_external_initializers_file_name", "whole.data")
    options.add_session_config_entry("session.save_external_prepacked_constant_initializers", "1")
    onnxruntime.InferenceSession(str(source), options)
    found, expected = packed_bytes(tmp_path / "packed.onnx"), packed_bytes(whole / "whole.onnx")
    assert expected
    assert set(expected.items()) <= set(found.items())


def packed_bytes(path: Path) -> dict[str, bytes]:
    """Digest of the packed buffers of each key."""
    found = {}
    for _, tensor in scoped_initializers(loaded(path).graph):
        if has_external_data(tensor):
            data = Path(external_tensor(tensor, str(path.parent)).path).read_bytes()
            for form in packed_weights(tensor):
                buffers = b"".join(data[b.offset : b.offset + b.nbytes] for b in form.buffers)
                found[form.key] = hashlib.sha256(buffers).digest()
    return found


def test_the_file_is_one_scan_in_order_of_use(tmp_path: Path, chain: Packable) -> None:
    source = save_external(chain.model, tmp_path / "model.onnx")
    report = pack_model(source, tmp_path / "packed.onnx", optimize="none")
    tensors = dict(scoped_initializers(loaded(tmp_path / "packed.onnx").graph))
    manifest = report.manifest
    packed = [packed_weights(tensors[f"w{i}"])[0].buffers[0].offset for i in range(3)]
    raw = [external_tensor(tensors[f"w{i}"], "").offset for i in range(3)]
    small = [external_tensor(tensors[f"b{i}"], "").offset for i in range(3)]
    assert small == [0, 1024, 2048]
    assert [manifest.streamed_start, *packed] == sorted([4096, *packed])
    assert max(packed) < manifest.streamed_end <= min(raw)
    assert raw == sorted(raw)
    assert all(offset % 4096 == 0 for offset in packed + raw)
    assert [(w.name, w.packed_for) for w in report.weights if w.packed_bytes] == [
        (f"w{i}", ("MatMul",)) for i in range(3)
    ]


def test_weights_that_are_tied_stay_tied(tmp_path: Path) -> None:
    made = PACKABLE["tied"]()
    report = pack_model(save_external(made.model, tmp_path / "model.onnx"), tmp_path / "packed.onnx")
    # Raw bytes once, because an embedding reads them, and packed bytes once, for all three products.
    assert report.data_bytes == 2 * 256 * 256 * 4
    tensors = dict(scoped_initializers(loaded(tmp_path / "packed.onnx").graph))
    assert packed_weights(tensors["w"]) == packed_weights(tensors["copy"]) != ()
    assert external_tensor(tensors["w"], "").offset == external_tensor(tensors["copy"], "").offset
    assert report.weights[1].note == "the same bytes as 'w'"


@pytest.mark.parametrize("name", PACKABLE)
def test_inline_external_and_delayed_weights_give_the_same_file(tmp_path: Path, name: str) -> None:
    made = PACKABLE[name]()
    (tmp_path / "inline.onnx").write_bytes(made.model.SerializeToString())
    save_external(made.model, tmp_path / "external.onnx")
    delayed_copy(made.model, tmp_path / "delayed.onnx")
    digests = set()
    for kind in ("inline", "external", "delayed"):
        target = tmp_path / kind
        target.mkdir()
        report = pack_model(tmp_path / f"{kind}.onnx", target / "packed.onnx")
        digests.add(hashlib.sha256(Path(report.data_file).read_bytes() if report.data_file else b"").digest())
        assert same_bytes(ours(target / "packed.onnx", made.feeds), plain(tmp_path / "inline.onnx", made.feeds))
    assert len(digests) == 1


def test_large_inline_weights_are_read_from_the_model_file(tmp_path: Path) -> None:
    """Above the size at which a skeleton leaves values in the file; a Constant node has one of them."""
    made = PACKABLE["chain"]()
    model = made.model
    moved = model.graph.initializer[0]
    constant = onnx.helper.make_node("Constant", [], [moved.name], value=moved)
    nodes = [constant, *model.graph.node]
    del model.graph.initializer[0]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    expected = plain(tmp_path / "model.onnx", made.feeds)
    report = pack_model(tmp_path / "model.onnx", tmp_path / "packed.onnx")
    assert sum(bool(w.packed_bytes) for w in report.weights) == 3
    assert same_bytes(ours(tmp_path / "packed.onnx", made.feeds), expected)


def test_the_result_is_the_same_in_every_process(tmp_path: Path, chain: Packable) -> None:
    source = save_external(chain.model, tmp_path / "model.onnx")
    code = "import sys\nfrom ort_delayed.packing import pack_model\npack_model(sys.argv[1], sys.argv[2])"
    found = []
    for number in range(2):
        target = tmp_path / str(number)
        target.mkdir()
        run_snippet(code, source, target / "packed.onnx")
        found.append(files(target))
    assert found[0] == found[1]


def test_without_packing_the_file_holds_raw_values_only(tmp_path: Path, chain: Packable) -> None:
    source = save_external(chain.model, tmp_path / "model.onnx")
    report = pack_model(source, tmp_path / "packed.onnx", prepack=False)
    assert not any(w.packed_bytes for w in report.weights)
    assert report.data_bytes < 1.1 * sum(w.raw_bytes for w in report.weights)
    assert same_bytes(ours(tmp_path / "packed.onnx", chain.feeds), plain(source, chain.feeds))


def test_a_packed_model_can_be_packed_again(tmp_path: Path, chain: Packable) -> None:
    source = save_external(chain.model, tmp_path / "model.onnx")
    pack_model(source, tmp_path / "packed.onnx")
    report = pack_model(tmp_path / "packed.onnx", tmp_path / "again.onnx")
    assert (
        report.data_bytes == (tmp_path / "again.onnx").parent.joinpath(report.manifest.data_file or "").stat().st_size
    )
    assert sum(bool(w.packed_bytes) for w in report.weights) == 3
    assert same_bytes(ours(tmp_path / "again.onnx", chain.feeds), plain(source, chain.feeds))


def test_metadata_names_and_shapes_of_the_source_stay(tmp_path: Path, chain: Packable) -> None:
    model = chain.model
    model.producer_name, model.producer_version, model.domain = "maker", "7", "some.domain"
    model.model_version, model.doc_string = 3, "what it does"
    model.metadata_props.add(key="mine", value="kept")
    source = save_external(model, tmp_path / "model.onnx")
    pack_model(source, tmp_path / "packed.onnx")
    before = onnxruntime.InferenceSession(str(source))
    after = onnxruntime.InferenceSession(str(tmp_path / "packed.onnx"))
    old, new = before.get_modelmeta(), after.get_modelmeta()
    for field in ("producer_name", "domain", "version", "description", "graph_name"):
        assert getattr(old, field) == getattr(new, field)
    assert loaded(tmp_path / "packed.onnx").producer_version == "7"
    assert new.custom_metadata_map["mine"] == "kept"
    assert [(i.name, i.shape, i.type) for i in before.get_inputs()] == [
        (i.name, i.shape, i.type) for i in after.get_inputs()
    ]


def test_the_report_and_the_manifest_say_what_was_done(tmp_path: Path, chain: Packable) -> None:
    source = save_external(chain.model, tmp_path / "model.onnx")
    report = pack_model(source, tmp_path / "packed.onnx")
    text = str(report)
    assert re.search(r"w0 +256 KiB +256 KiB +FusedGemm", text)
    assert "3 of 6 weights packed" in text
    assert report.manifest == read_manifest(loaded(tmp_path / "packed.onnx"))
    assert report.manifest.optimize == "all"
    assert report.manifest.environment.onnxruntime == onnxruntime.__version__
    assert report.streamed_bytes < report.data_bytes
    assert verify_packed_model(tmp_path / "packed.onnx")


def test_the_digest_of_the_source_follows_model_and_weights(tmp_path: Path, chain: Packable) -> None:
    source = save_external(chain.model, tmp_path / "model.onnx")
    digests = [pack_model(source, tmp_path / "packed.onnx", overwrite=True).manifest.source_digest for _ in range(2)]
    data = tmp_path / "model.onnx.data"
    content = bytearray(data.read_bytes())
    content[100] ^= 1
    data.write_bytes(content)
    digests.append(pack_model(source, tmp_path / "packed.onnx", overwrite=True).manifest.source_digest)
    assert digests[0] == digests[1] != digests[2]


# --- Refusals and failures --------------------------------------------------------------------------------------------


def test_refusals_leave_everything_as_it_was(tmp_path: Path, chain: Packable) -> None:
    source = save_external(chain.model, tmp_path / "model.onnx")
    other = tmp_path / "other.onnx"
    other.write_bytes(b"mine")
    before = files(tmp_path)
    with pytest.raises(ValueError, match="optimize must be one of 'all', 'extended', 'basic', 'none', found 'most'"):
        pack_model(source, tmp_path / "packed.onnx", optimize="most")
    with pytest.raises(FileExistsError, match="pass overwrite=True"):
        pack_model(source, other)
    with pytest.raises(ValueError, match="same file"):
        pack_model(source, source, overwrite=True)
    with pytest.raises(ValueError, match="not an ONNX model"):
        pack_model(other, tmp_path / "packed.onnx")
    with pytest.raises(FileNotFoundError):
        pack_model(tmp_path / "none.onnx", tmp_path / "packed.onnx")
    assert files(tmp_path) == before


def test_a_weights_file_that_is_too_short_is_refused_by_name(tmp_path: Path, chain: Packable) -> None:
    source = save_external(chain.model, tmp_path / "model.onnx")
    data = tmp_path / "model.onnx.data"
    data.write_bytes(data.read_bytes()[:-5000])
    with pytest.raises(EOFError, match=r"model\.onnx\.data"):
        pack_model(source, tmp_path / "packed.onnx")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.onnx", "model.onnx.data"]


def test_a_model_that_onnxruntime_refuses_leaves_nothing(tmp_path: Path, chain: Packable) -> None:
    chain.model.graph.node[0].op_type = "NoSuchOperator"
    source = save_external(chain.model, tmp_path / "model.onnx")
    with pytest.raises(Exception, match="NoSuchOperator"):
        pack_model(source, tmp_path / "packed.onnx")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.onnx", "model.onnx.data"]


def test_overwriting_removes_the_old_data_file_and_a_session_on_it_goes_on(tmp_path: Path, chain: Packable) -> None:
    source = save_external(chain.model, tmp_path / "model.onnx")
    first = pack_model(source, tmp_path / "packed.onnx")
    session = ort_delayed.InferenceSession(tmp_path / "packed.onnx")
    expected = session.run(None, dict(chain.feeds))
    second = pack_model(source, tmp_path / "packed.onnx", prepack=False, overwrite=True)
    assert first.data_file != second.data_file
    assert not Path(first.data_file or "").exists()
    assert same_bytes(session.run(None, dict(chain.feeds)), expected)
    assert same_bytes(ours(tmp_path / "packed.onnx", chain.feeds), expected)


def test_a_killed_pack_leaves_no_model_and_the_next_one_cleans_up(tmp_path: Path, chain: Packable) -> None:
    source = save_external(chain.model, tmp_path / "model.onnx")
    code = """
    import os, signal, sys
    import ort_delayed.packed_data as packed_data
    from ort_delayed.packing import pack_model

    def killed(*arguments):
        print("killed", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    packed_data.pack_piece = killed
    pack_model(sys.argv[1], sys.argv[2])
    """
    with pytest.raises(AssertionError, match="killed"):
        run_snippet(code, source, tmp_path / "packed.onnx")
    assert not (tmp_path / "packed.onnx").exists()
    assert list(tmp_path.glob(".packed.onnx.*.packing"))
    pack_model(source, tmp_path / "packed.onnx")
    assert not list(tmp_path.glob(".packed.onnx.*.packing"))
    assert same_bytes(ours(tmp_path / "packed.onnx", chain.feeds), plain(source, chain.feeds))


def test_a_kernel_that_packs_what_it_cannot_save_packs_it_at_load(
    tmp_path: Path, chain: Packable, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ort_delayed.packed_data as packed_data

    pack_piece = packed_data.pack_piece

    def failing(model: onnx.ModelProto, scratch: str, stem: str) -> packed_data.SavedModel:
        if any(t.dims == [256, 256] and t.external_data[1].value == first for t in model.graph.initializer):
            raise RuntimeError("doesn't have an implementation that can cache computed pre-packed weights")
        return pack_piece(model, scratch, stem)

    source = save_external(chain.model, tmp_path / "model.onnx")
    expected = plain(source, chain.feeds)
    first = "0"
    monkeypatch.setattr(packed_data, "pack_piece", failing)
    report = pack_model(source, tmp_path / "packed.onnx")
    unpacked = [w for w in report.weights if w.note]
    assert len(unpacked) >= 1
    assert unpacked[0].note == "FusedGemm packs it when a session is made: it cannot be saved"
    assert same_bytes(ours(tmp_path / "packed.onnx", chain.feeds), expected)


def test_a_hub_cache_packs_into_another_directory(tmp_path: Path, chain: Packable) -> None:
    snapshot, blobs = tmp_path / "repo" / "snapshots" / "abc", tmp_path / "repo" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    save_external(chain.model, tmp_path / "model.onnx")
    for number, name in enumerate(("model.onnx", "model.onnx.data")):
        os.rename(tmp_path / name, blobs / str(number))
        os.symlink(f"../../blobs/{number}", snapshot / name)
    target = tmp_path / "elsewhere"
    target.mkdir()
    pack_model(snapshot / "model.onnx", target / "packed.onnx")
    (tmp_path / "inline.onnx").write_bytes(chain.model.SerializeToString())
    assert same_bytes(ours(target / "packed.onnx", chain.feeds), plain(tmp_path / "inline.onnx", chain.feeds))


def test_memory_of_packing_is_that_of_a_piece_not_of_the_model(tmp_path: Path) -> None:
    """24 weights of 4 MiB in pieces of 8 MiB: held all at once, packed, they would take 96 MiB, raw ones as much."""
    weights = {f"w{i}": random(512, 2048, seed=i) if i % 2 == 0 else random(2048, 512, seed=i) for i in range(24)}
    names = ["x", *(f"h{i}" for i in range(23)), "y"]
    nodes = [onnx.helper.make_node("MatMul", [names[i], f"w{i}"], [names[i + 1]]) for i in range(24)]
    floats = onnx.TensorProto.FLOAT
    graph = onnx.helper.make_graph(
        nodes,
        "graph",
        [onnx.helper.make_tensor_value_info("x", floats, ["n", 512])],
        [onnx.helper.make_tensor_value_info("y", floats, None)],
        [onnx.numpy_helper.from_array(w, n) for n, w in weights.items()],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    source = save_external(model, tmp_path / "model.onnx")
    del model, graph, weights
    code = """
    import functools, sys
    from ort_delayed import packed_data
    from ort_delayed.packing import pack_model
    packed_data.plan_pieces = functools.partial(packed_data.plan_pieces, piece_bytes=8 << 20)
    print(pack_model(sys.argv[1], sys.argv[2]).peak_incremental_bytes)
    """
    peak = run_snippet(code, source, tmp_path / "packed.onnx").strip()
    if peak == "None":
        pytest.skip("the system keeps no high-water mark")
    assert int(peak) < 80 << 20


def test_casts_that_onnxruntime_inserts_under_one_name_in_bodies_within_bodies(tmp_path: Path) -> None:
    def choice(value: str, seed: int, inner: bool) -> onnx.GraphProto:
        w = numpy_helper.from_array(random(8, seed=seed).astype(np.float16), f"w{seed}")
        nodes = [helper.make_node("Add", [value, f"w{seed}"], [f"a{seed}"])]
        for turn in ("t", "u"):
            source = f"a{seed}" if turn == "t" else f"t{seed}"
            nodes.append(helper.make_node("Transpose", [source], [f"{turn}{seed}"], perm=[1, 0]))
        last = f"u{seed}"
        if inner:
            branches = {
                "then_branch": choice(last, 10 * seed, inner=False),
                "else_branch": choice(last, 10 * seed + 1, inner=False),
            }
            nodes.append(helper.make_node("If", ["flag"], [f"y{seed}"], **branches))
            last = f"y{seed}"
        yields = [helper.make_tensor_value_info(last, TensorProto.FLOAT16, None)]
        return helper.make_graph(nodes, f"g{seed}", [], yields, [w])

    branches = {"then_branch": choice("x", 1, inner=True), "else_branch": choice("x", 2, inner=True)}
    graph = helper.make_graph(
        [helper.make_node("If", ["flag"], ["y"], **branches)],
        "graph",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT16, [3, 8]),
            helper.make_tensor_value_info("flag", TensorProto.BOOL, []),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT16, None)],
    )
    source, packed = tmp_path / "m.onnx", tmp_path / "p.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), source)
    pack_model(source, packed)
    for flag in (True, False):
        feeds = {"x": random(3, 8).astype(np.float16), "flag": np.array(flag)}
        (expected,) = onnxruntime.InferenceSession(str(source)).run(None, feeds)
        (found,) = ort_delayed.InferenceSession(str(packed)).run(None, feeds)
        assert found.tobytes() == expected.tobytes()
