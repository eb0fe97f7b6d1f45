"""The layout's rules hold for this tree, and each of them can fail."""

from pathlib import Path

import pytest

import import_contract as contract

ROOT = Path(__file__).resolve().parent.parent
EVERYWHERE = ("model", "service", "tools", "tests")


@pytest.fixture(scope="module")
def sources() -> list[contract.Source]:
    return contract.read_tree(ROOT, EVERYWHERE)


@pytest.mark.parametrize(
    "rule",
    [
        contract.model_is_pure,
        contract.only_the_executor_owns_the_device,
        contract.stubs_stay_at_the_edge,
        contract.policy_is_standard_library,
        contract.no_cycles,
        contract.private_names_stay_home,
        contract.names_and_sizes,
    ],
)
def test_this_tree(rule, sources):
    assert rule(sources) == []


def test_the_map_is_true(sources):
    assert contract.map_is_true(ROOT, sources) == []


def test_the_tree_is_really_read(sources):
    paths = {source.path for source in sources}
    assert {
        "model/transformer.py",
        "service/engine/types.py",
        "tests/test_architecture.py",
    } <= paths
    assert not any(path.startswith("service/pb/") for path in paths)


def made_up(root: Path, files: dict[str, str]) -> list[contract.Source]:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return contract.read_tree(root, EVERYWHERE)


@pytest.mark.parametrize(
    ("rule", "files", "complaints"),
    [
        pytest.param(
            contract.model_is_pure,
            {
                "model/checkpoint.py": "import safetensors\nopen('x')\n",
                "model/moe.py": "def f():\n    from service.engine import types\n    open('x')\n",
                "model/cache.py": "import pathlib, threading\n",
            },
            [
                "model/cache.py:1 touches files through pathlib",
                "model/cache.py:1 imports threading",
                "model/moe.py:2 imports service.engine",
                "model/moe.py:3 opens a file",
            ],
            id="model reaches out",
        ),
        pytest.param(
            contract.only_the_executor_owns_the_device,
            {
                "model/__init__.py": "",
                "model/decode.py": "",
                "service/engine/executor.py": "import jax\nfrom model import decode\n",
                "service/config.py": "import model\nfrom model import decode\n",
                "service/engine/loop.py": "import jax.numpy as jnp\n",
            },
            [
                "service/config.py:2 imports model.decode",
                "service/engine/loop.py:1 imports jax.numpy",
            ],
            id="two device owners",
        ),
        pytest.param(
            contract.stubs_stay_at_the_edge,
            {
                "service/servicer.py": "from service.pb.tandem.v1 import inference_pb2\n",
                "service/engine/engine.py": "from ..pb import x\nimport service.pb.y\n",
                "service/text/parsers.py": "from service import pb\n",
            },
            [
                "service/engine/engine.py:1 imports service.pb",
                "service/engine/engine.py:2 imports service.pb",
                "service/text/parsers.py:1 imports service.pb",
            ],
            id="messages inside the engine",
        ),
        pytest.param(
            contract.policy_is_standard_library,
            {
                "service/engine/types.py": "",
                "service/engine/pages.py": "import numpy\n",
                "service/engine/slots.py": "import heapq\nfrom service.engine import pages\n",
                "service/engine/scheduler.py": (
                    "from service.engine.types import A\nfrom service import errors\n"
                ),
            },
            [
                "service/engine/pages.py:1 imports numpy",
                "service/engine/scheduler.py:2 imports service",
            ],
            id="policy with company",
        ),
        pytest.param(
            contract.no_cycles,
            {
                "model/a.py": "from model import b\n",
                "model/b.py": "def f():\n    import model.c\n",
                "model/c.py": "from .a import x\n",
            },
            ["import cycle: model.a -> model.b -> model.c -> model.a"],
            id="cycle",
        ),
        pytest.param(
            contract.no_cycles,
            {
                "model/a.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n"
                "    from model.b import B\n",
                "model/b.py": "import model.a\n",
            },
            [],
            id="types only is no cycle",
        ),
        pytest.param(
            contract.private_names_stay_home,
            {
                "service/a.py": "_x = 1\nclass A:\n    def f(self):\n        return self._y\n",
                "service/b.py": "from service.a import _x\n",
                "tests/test_a.py": "import service.a\nfrom service import a\nservice.a._x\na._x\n",
            },
            [
                "service/b.py:1 imports service.a._x",
                "tests/test_a.py:3 uses service.a._x",
                "tests/test_a.py:4 uses a._x",
            ],
            id="private names abroad",
        ),
        pytest.param(
            contract.names_and_sizes,
            {
                "service/utils.py": "",
                "tests/model/__init__.py": "",
                "model/long.py": "x = 1\n" * 601,
                "model/deep.py": "def f():\n" + "    x = 1\n" * 100,
                "model/fine.py": "def f():\n" + "    x = 1\n" * 99,
            },
            [
                "model/deep.py:1 f has 101 lines, limit 100",
                "model/long.py has 601 lines, limit 600",
                "service/utils.py says nothing by its name",
                "tests/model/__init__.py makes a package that shadows model or service",
            ],
            id="names and sizes",
        ),
    ],
)
def test_a_rule_can_fail(tmp_path, rule, files, complaints):
    assert sorted(rule(made_up(tmp_path, files))) == sorted(complaints)


def test_the_map_can_lie(tmp_path):
    files = {
        "model/decode.py": "",
        "model/kernels/sort/reference.py": "",
        "service/server.py": "",
        "service/__init__.py": "",
    }
    sources = made_up(tmp_path, files)
    (tmp_path / "ARCHITECTURE.md").write_text(
        "`model/` holds model/decode.py and model/gone.py; see `model/kernels/sort/`, GONE.md.\n"
    )
    assert contract.map_is_true(tmp_path, sources) == [
        "ARCHITECTURE.md leaves out service/server.py",
        "ARCHITECTURE.md names GONE.md: no such file",
        "ARCHITECTURE.md names model/gone.py: no such file",
    ]
