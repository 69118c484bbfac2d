"""Processes that wait for the first one, which works for longer than the timeout, and then hangs, at the first start.

VITRAIL_TIMEOUT=4 python -m torch.distributed.run --standalone --nproc-per-node 2 tests/distributed/hung.py
"""

from __future__ import annotations

import os
import signal
import time

from vitrail.world import World

if __name__ == "__main__":
    world = World.join()
    if not world.restarted:
        world.once(lambda: time.sleep(6))
        world.once(lambda: os.kill(os.getpid(), signal.SIGSTOP))
    print("done")
