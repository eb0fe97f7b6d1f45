from pathlib import Path

import pytest

import tiny_tokenizer
from service.model_card import ModelCard
from service.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    return tiny_tokenizer.write_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tokenizer(checkpoint) -> Tokenizer:
    return Tokenizer.from_directory(checkpoint)


@pytest.fixture(scope="session")
def card(checkpoint) -> ModelCard:
    return ModelCard.from_directory(checkpoint)
