"""LoRA adapters: each request is answered as by a model with its adapter merged in, whatever else is in the batch."""

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import jax
import jax.numpy as jnp
import ml_dtypes
import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from podway.errors import UserError
from podway.model.adapter_files import Adapter, matrices, modules, read_adapter
from podway.model.decoder import Tree
from podway.model.layout import MeshShape
from podway.model.mesh import make_mesh
from podway.model.shape import ModelShape
from podway.serve import build
from podway.serve.adapter_registry import AdapterRegistry
from podway.serve.adapters import AdapterSizes, adapter_bytes, with_room
from podway.serve.adapters_nvidia import add_adapters, suits
from podway.serve.options import adapter_modules, adapter_room, parser
from tests.serve.live import BYTES, Live, live
from tests.serve.tiny import LLAMA, MIXTRAL, Runner, all_logits, engine_for, weights

SIZES = AdapterSizes(3, 4)
AS_ON_TPUS: dict[str, object] = {}  # the matrices of heads are stored with the outputs first
SMALL = {"max_seqs": 3, "prompt_tokens": 16, "adapters": SIZES}


def write(folder: Path, shape: ModelShape, seed: int, rank: int, names: tuple[str, ...], **about: object) -> Path:
    """An adapter as PEFT writes it, large enough to change what is said."""
    chance = np.random.default_rng(seed)
    tensors = {}
    for name in names:
        for module, inputs, outputs in modules(matrices(shape)[name]):
            tensors[f"{module}.lora_A.weight"] = chance.normal(size=(rank, inputs)).astype(np.float32)
            tensors[f"{module}.lora_B.weight"] = chance.normal(size=(outputs, rank)).astype(np.float32) * 0.2
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    known = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none", "use_dora": False} | about
    (folder / "adapter_config.json").write_text(json.dumps(known))
    return folder


def merged(shape: ModelShape, adapter: Adapter) -> Tree:
    layers = dict(weights(shape)["layers"])
    for name, (a, b) in adapter.pairs.items():
        inner, outer = a.shape[1:-1], b.shape[2:]
        product = np.einsum("lir,lro->lio", a.reshape(len(a), -1, adapter.rank), b.reshape(len(b), adapter.rank, -1))
        layers[name] = layers[name] + jnp.asarray(product.reshape(len(a), *inner, *outer))
    return {**weights(shape), "layers": layers}


def expected(shape: ModelShape, prompt: list[int], count: int, adapter: Adapter | None) -> list[int]:
    tree = merged(shape, adapter) if adapter is not None else None
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count:
        tokens.append(int(all_logits(shape, tokens, tree)[-1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("rows", [1, 5])
def test_the_gpu_kernel_adds_what_each_row_s_adapter_makes(rows: int) -> None:
    chance, widths, columns, rank = np.random.default_rng(rows), (256, 128, 128), 16, 4
    made = chance.normal(size=(rows, sum(widths) + len(widths) * columns)).astype(np.float32)
    b = chance.normal(size=(columns, sum(widths))).astype(np.float32)
    adapter = np.asarray([2, 0, 4, 1, 2][:rows], np.int32)  # 0: the model itself
    expected = made[:, : sum(widths)].copy()
    for row, number in enumerate(adapter):
        for part, (begin, end) in enumerate(((0, 256), (256, 384), (384, 512))):
            own = slice((number - 1) * rank, number * rank)
            if number:
                inner = made[row, sum(widths) + part * columns :][:columns][own]
                expected[row, begin:end] += inner @ b[own, begin:end]
    assert suits(rows, widths, columns, rank) and not suits(rows, (96,), columns, rank)
    got = add_adapters(jnp.asarray(made), jnp.asarray(b), jnp.asarray(adapter), widths, rank, interpret=True)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "changes", "tensor"),
    [
        (LLAMA, {"speculate": 3}, 0),
        pytest.param(LLAMA, {"unroll": True}, 0, marks=pytest.mark.long),
        pytest.param(LLAMA, {}, 4, marks=pytest.mark.long),
        pytest.param(LLAMA, AS_ON_TPUS, 4, marks=pytest.mark.long),
        pytest.param(MIXTRAL, {}, 0, marks=pytest.mark.soak),
    ],
    ids=["with drafts", "written out and fused", "four devices", "four devices, heads as on TPUs", "experts"],
)
def test_adapters_in_one_batch_equal_merged_weights(
    tmp_path: Path,
    shape: ModelShape,
    changes: dict[str, object],
    tensor: int,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if changes is AS_ON_TPUS:
        monkeypatch.setattr(build, "heads_turned", lambda *_: True)
    if tensor:
        request.getfixturevalue("nothing_kept")
    mesh = make_mesh(MeshShape(tensor=tensor), jax.devices()[:tensor]) if tensor else None
    engine = engine_for(shape, mesh=mesh, **SMALL, **changes)
    dense = ("q", "k", "v", "o") if shape.experts else ("q", "k", "v", "o", "gate", "up", "down")
    first = read_adapter(write(tmp_path / "first", shape, 1, 4, dense), shape)
    second = read_adapter(write(tmp_path / "second", shape, 2, 2, ("q", "v"), use_rslora=True), shape)
    adapters = {0: None, 1: first, 3: second}
    for number, adapter in adapters.items():
        if adapter is not None:
            engine.set_adapter(number, adapter)
    runner, prompt = Runner(engine), [5, 17, 40, 3, 9, 5, 17, 40, 3]
    requests = {number: runner.submit(prompt, 8, adapter=number, salt=b"%d" % number) for number in adapters}
    runner.finish()
    answers = {number: request.answer for number, request in requests.items()}
    assert answers == {number: expected(shape, prompt, 8, adapter) for number, adapter in adapters.items()}
    assert len({tuple(answer) for answer in answers.values()}) == 3, "the adapters change nothing"
    engine.set_adapter(1, None)  # and out again
    runner = Runner(engine)
    bare = runner.submit(prompt, 8, adapter=1)
    runner.finish()
    assert bare.answer == answers[0]


def test_bytes_are_those_of_the_arrays() -> None:
    tree = with_room({"layers": {}}, LLAMA, SIZES, jnp.float32, None)
    found = sum(array.nbytes for array in tree["layers"].values())
    assert found == adapter_bytes(LLAMA, SIZES, 4)


def test_adapters_as_peft_writes_them(tmp_path: Path) -> None:
    folder = write(tmp_path / "whole", LLAMA, 1, 2, ("q", "down"))
    pair = read_adapter(folder, LLAMA).pairs["q"]
    tensors = {
        "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight": pair[0][1].reshape(32, 2).T,
        "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight": pair[1][1].reshape(2, 32).T / 2,
    }
    save_file(
        {name: np.ascontiguousarray(one).astype(ml_dtypes.bfloat16) for name, one in tensors.items()},
        folder / "adapter_model.safetensors",
    )
    one_layer = read_adapter(folder, LLAMA).pairs["q"]  # in bfloat16, and of the second layer alone
    assert not one_layer[0][0].any() and not one_layer[1][0].any()
    np.testing.assert_allclose(one_layer[1][1], pair[1][1], rtol=0.01)


@pytest.mark.parametrize(
    ("about", "words"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern"),
        ({"peft_type": "IA3"}, "not the configuration of a LoRA adapter"),
        ({"r": "2"}, "not the configuration of a LoRA adapter"),
        ({"r": 3}, "is [2, 32] and must be [3, 32]"),
    ],
)
def test_what_is_not_done_is_refused_by_name(tmp_path: Path, about: dict[str, object], words: str) -> None:
    folder = write(tmp_path / "one", LLAMA, 1, 2, ("q",), **about)
    with pytest.raises(UserError) as caught:
        read_adapter(folder, LLAMA)
    assert words in caught.value.what


def test_files_that_are_missing_or_of_another_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read the adapter"):
        read_adapter(tmp_path, LLAMA)
    other = msgspec.structs.replace(LLAMA, layers=3)
    with pytest.raises(UserError, match=r"holds .*layers\.2"):
        read_adapter(write(tmp_path / "three", other, 1, 2, ("q",)), LLAMA)
    (tmp_path / "three" / "adapter_model.safetensors").write_bytes(b"no")
    with pytest.raises(UserError, match="cannot read the adapter"):
        read_adapter(tmp_path / "three", LLAMA)


def test_flags() -> None:
    def asked(*words: str) -> tuple[tuple[int, int] | None, list[tuple[str, str]]]:
        args = parser().parse_args(["model", *words])
        return adapter_room(args), adapter_modules(args)

    assert asked() == (None, [])
    assert asked("--enable-lora") == ((4, 16), [])
    assert asked("--lora-modules", "a=/x", '{"name": "b", "path": "/y=z"}')[1] == [("a", "/x"), ("b", "/y=z")]
    assert asked("--max-loras", "2", "--max-lora-rank", "64")[0] == (2, 64)
    for words in (
        ["--lora-modules", "a"], ["--lora-modules", "{"], ["--max-loras", "0"], ["--enable-lora", "--max-lora-rank", "0"],
        ["--lora-modules", "a=x", "b=y", "--max-loras", "1"],
    ):  # fmt: skip
        with pytest.raises(UserError):
            asked(*words)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live(tmp_path_factory.mktemp("model"), max_seqs=2, prompt_tokens=32, adapters=AdapterSizes(2, 4)) as made:
        made.service.adapters = AdapterRegistry(AdapterSizes(2, 4), BYTES, "tiny", updatable=True)
        yield made


def test_adapters_come_and_go_by_the_api(server: Live, tmp_path: Path) -> None:
    folders = {name: str(write(tmp_path / name, BYTES, seed, 4, ("q", "v", "o"))) for seed, name in enumerate("abc", 1)}

    def load(name: str, path: str) -> httpx.Response:
        return httpx.post(f"{server.url}/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path}, timeout=60)

    def unload(name: str) -> httpx.Response:
        return httpx.post(f"{server.url}/v1/unload_lora_adapter", json={"lora_name": name}, timeout=60)

    def ask(model: str) -> httpx.Response:
        body = {"model": model, "prompt": "hello, hello, hello", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        return httpx.post(f"{server.url}/v1/completions", json=body | {"return_token_ids": True}, timeout=60)

    def tokens(model: str) -> list[int]:
        answer = ask(model).json()
        assert answer["model"] == model
        return list(answer["choices"][0]["token_ids"])

    bare = tokens("tiny")
    assert load("a", folders["a"]).status_code == load("b", folders["b"]).status_code == 200
    listed = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert [(one["id"], one["parent"]) for one in listed] == [("tiny", None), ("a", "tiny"), ("b", "tiny")]
    assert httpx.get(f"{server.url}/v1/models/a").json()["root"] == folders["a"]
    said = {name: tokens(name) for name in "ab"}
    prompt = list(b"hello, hello, hello")
    for name, answer in said.items():
        assert answer == expected(BYTES, prompt, 8, read_adapter(Path(folders[name]), BYTES))
    assert tokens("tiny") == bare and said["a"] != bare, "no page of the cache is shared between them"
    assert tokens("a") == said["a"]
    full, again, wrong = load("c", folders["c"]), load("a", folders["c"]), load("d", "/nowhere")
    assert [one.status_code for one in (full, again, wrong)] == [400, 400, 400]
    assert "2 places" in full.text and "already" in again.text and "cannot read" in wrong.text
    assert unload("a").status_code == 200 and unload("a").status_code == 404 and ask("a").status_code == 404
    assert load("a", folders["c"]).status_code == 200
    assert tokens("a") == expected(BYTES, prompt, 8, read_adapter(Path(folders["c"]), BYTES)), (
        "another one of that name"
    )
    server.wait_until_empty()


def test_a_place_is_not_given_away_while_somebody_uses_it(server: Live, tmp_path: Path) -> None:
    registry = AdapterRegistry(AdapterSizes(1, 4), BYTES, "tiny", updatable=True)
    path = str(write(tmp_path / "one", BYTES, 1, 4, ("q",)))
    registry.load("one", path, [], set)
    registry.unload("one")
    with pytest.raises(UserError, match="all 1 places"):
        registry.load("two", path, [], lambda: {0, 1})
    registry.load("two", path, [], lambda: {0})


def test_servers_that_do_not_allow_it_read_no_folder(server: Live) -> None:
    assert server.service.adapters is not None
    server.service.adapters.updatable = False
    try:
        refused = httpx.post(f"{server.url}/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": "/etc"})
        assert refused.status_code == 403 and "--allow-lora-updates" in refused.text
    finally:
        server.service.adapters.updatable = True
