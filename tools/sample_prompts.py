"""Prompts for measuring: beginnings of functions from Python files that the demo did not train on."""

from __future__ import annotations

import ast
import itertools
import random

from demo_training.corpus import LIBRARY, find_documents, is_held_out

_FEWEST_LINES = 8


def held_out_functions(count: int, seed: int = 0) -> list[str]:
    """The first half of `count` functions from held-out files of the standard library.

    Args:
      count: prompts wanted; files are taken in turn.
      seed: of the choice.
    """
    chosen: list[list[str]] = []
    for document in find_documents()[LIBRARY]:
        if not is_held_out(document.path):
            continue
        lines = document.text.splitlines(keepends=True)
        functions = [
            "".join(lines[node.lineno - 1 : (node.lineno + node.end_lineno) // 2])
            for node in ast.walk(ast.parse(document.text))
            if isinstance(node, ast.FunctionDef)
            and node.end_lineno is not None
            and node.end_lineno - node.lineno >= _FEWEST_LINES
        ]
        random.Random(seed).shuffle(functions)
        chosen.append(functions)
    in_turn = (f for group in itertools.zip_longest(*chosen) for f in group if f is not None)
    return list(itertools.islice(in_turn, count))
