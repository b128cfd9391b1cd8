"""What a command imports and reads before it does its work: bounds on a start's cost."""

from __future__ import annotations

import pytest

from mckpt.cli.program import COMMANDS, cli


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_of_commands_has_the_first_sentence_of_each_help(name: str) -> None:
    assert cli.commands[name].name == name
    assert cli.commands[name].get_short_help_str(200) == COMMANDS[name].text
