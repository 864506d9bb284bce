"""What test workers do. Apart from the tests, so that a worker process starts without importing torch."""

import os
import time


def echo(rank: int, text: str) -> str:
    return f"{text} {rank}"


def fail_second(rank: int) -> int:
    if rank == 1:
        raise RuntimeError("no\nluck")
    time.sleep(600)
    return rank


def die(rank: int) -> None:
    os._exit(7)


def sleep_second(rank: int) -> None:
    if rank == 1:
        time.sleep(600)
