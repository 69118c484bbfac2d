"""Commands one after the other in this process, which torchrun may have started with others.

    python -m torch.distributed.run --standalone --nproc-per-node 2 tests/distributed/commands.py COMMANDS

COMMANDS is a JSON file: a list of command lines. With $FAILS, the process of this rank fails in the third step of the
last one.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

from vitrail import cli
from vitrail.errors import UserError
from vitrail.train import loop
from vitrail.verbs import takes_part

make_batch = loop.make_batch
steps = 0


def failing(*batch: Any, **how: Any) -> Any:
    global steps
    steps += 1
    if steps == 3:
        raise UserError("An image of this process cannot be read.")
    return make_batch(*batch, **how)


if __name__ == "__main__":
    commands = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    for words in commands[:-1]:
        assert not takes_part(words) or cli.run(words) == 0, words
    with patch.object(loop, "make_batch", failing if os.environ.get("FAILS") == os.environ.get("RANK") else make_batch):
        cli.main(commands[-1])
