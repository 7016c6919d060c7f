"""Ours: the array type of the other benchmarks."""

import program
from lora import VENEER

if __name__ == "__main__":
    program.run("veneer", VENEER)
