"""Every recovery story goes as its committed transcript says, line by line."""

from __future__ import annotations

import pytest

from tests.scenarios.stories import FOLDER, STORIES, transcript


@pytest.mark.parametrize("name", STORIES)
def test_the_story_goes_as_told(name: str) -> None:
    told = (FOLDER / f"{name}.txt").read_text(encoding="utf-8")
    assert transcript(name) == told, (
        "the story has changed; python -m tests.scenarios.stories --regenerate, then review the diff"
    )


def test_no_transcript_is_left_without_its_story() -> None:
    assert {path.stem for path in FOLDER.glob("*.txt")} == set(STORIES)
