"""One rank of all that `test_distributed.py` runs on several: DIRECTORY of the model, and OUTPUT, another one."""

import pathlib
import sys

import torch.distributed as dist

import distributed_data_parallel
import distributed_tensor_parallel


def main(directory: str, output: str) -> None:
    dist.init_process_group("gloo")
    distributed_data_parallel.main(directory, pathlib.Path(output) / "training")
    dist.barrier()
    distributed_tensor_parallel.main(directory, pathlib.Path(output) / "tokens")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
