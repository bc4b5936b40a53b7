"""Every command of README.md, and how long each generate.py takes until its first token.

    python tests/readme.py          runs each `generate.py` as a new user would, one after the other
    python tests/readme.py --list   prints every command

test_readme.py runs the same ones on a tiny model, and lets eval.py, which takes minutes, only read its flags.
"""

import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCUMENT = "The lighthouse keeper wrote every storm into a ledger. " * 60
REQUESTS = '{"prompt": "What is a llama?", "max_new_tokens": 20}\n{"prompt": "What is a cache?"}\n'


def commands() -> list[list[str]]:
    """Words of each command that starts a Python program, from blocks of shell and from lines of text, as they come."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = []
    for block, line in re.findall(r"```sh\n(.*?)```|`([^`\n]+)`", text, re.S):
        for command in re.split(r"\n|&&", (block or line).replace("\\\n", " ")):
            words = shlex.split(command, comments=True) if re.match(r"\s*(python|torchrun|pytest) ", command) else []
            if len(words) > 1 and ".." not in words and words not in found:
                found.append(words)
    return found


def write_files(path: Path) -> None:
    """What the commands expect to find."""
    (path / "document.txt").write_text(DOCUMENT, encoding="utf-8")
    (path / "requests.jsonl").write_text(REQUESTS, encoding="utf-8")


def main() -> None:
    if "--list" in sys.argv:
        print(*(shlex.join(words) for words in commands()), sep="\n")
        return
    print("first token      all  exit  command")
    with tempfile.TemporaryDirectory() as home:
        write_files(Path(home))
        for words in commands():
            if "generate.py" not in words:
                continue
            at = words.index("generate.py")
            torchrun = ["-m", "torch.distributed.run", *words[1:at]] if words[0] == "torchrun" else []
            began = time.perf_counter()
            child = subprocess.Popen(
                [sys.executable, *torchrun, str(ROOT / "generate.py"), *words[at + 1 :]],
                cwd=home,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            child.stdin.write(b"Hello, who are you?\n" if "--interactive" in words else b"")
            child.stdin.close()
            child.stdout.read(1)
            first = time.perf_counter() - began
            child.stdout.read()
            code = child.wait()
            print(f"{first:9.1f} s {time.perf_counter() - began:6.1f} s {code:5}  {shlex.join(words)}", flush=True)


if __name__ == "__main__":
    main()
