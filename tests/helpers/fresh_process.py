"""Scripts in processes of their own, which have imported transformers and nothing of kvlayers if not told otherwise.

torch and transformers take seconds to import: one process does so once, and forks for each script.
"""

import functools
import json
import os
import subprocess
import sys
import tempfile
import traceback
from typing import IO, Any

BEFORE = "import torch, transformers"


def run(
    script: str, before: str = BEFORE, with_exit_handlers: bool = False, **environment: str
) -> "subprocess.CompletedProcess[str]":
    """Run Python code in a fresh process, to its end.

    Args:
        script: the code.
        before: code that the process has run already, the same for many scripts.
        with_exit_handlers: whether the process ends as Python ends, which takes longer.
        environment: variables of the process, besides those of this one.
    """
    if not hasattr(os, "fork"):
        command = [sys.executable, "-c", f"{before}\n{script}"]
        places = os.pathsep.join((os.path.dirname(__file__), *os.environ.get("PYTHONPATH", "").split(os.pathsep)))
        variables = {**os.environ, "PYTHONPATH": places, **environment}
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=variables)
    server = _server(before, **environment)
    assert server.stdin is not None
    assert server.stdout is not None
    print(json.dumps([script, with_exit_handlers]), file=server.stdin, flush=True)
    return subprocess.CompletedProcess([script], **json.loads(server.stdout.readline()))


@functools.cache
def _server(before: str, **environment: str) -> "subprocess.Popen[str]":
    # It ends with the process that has its standard input.
    command, variables = [sys.executable, __file__, before], {**os.environ, **environment}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables)


def _serve() -> None:
    exec(sys.argv[1], {})
    for line in sys.stdin:
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            child = os.fork()
            if not child:
                _run(*json.loads(line), out, err)
            returncode = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            print(json.dumps({"returncode": returncode, "stdout": _read(out), "stderr": _read(err)}), flush=True)


def _run(script: str, with_exit_handlers: bool, out: IO[Any], err: IO[Any]) -> None:
    os.dup2(out.fileno(), 1)
    os.dup2(err.fileno(), 2)
    code: Any = 0
    try:
        exec(compile(script, "<script>", "exec"), {"__name__": "__main__"})
    except SystemExit as ended:
        code = ended.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    if with_exit_handlers:
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


def _read(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


if __name__ == "__main__":
    _serve()
