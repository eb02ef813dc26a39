"""The task files inside the seed documents: which block of which document each file of examples/seeds is.

`extract` finds the YAML blocks of a document (Markdown fences, reStructuredText code blocks), takes away the indentation
the document gives them, and nothing else. `python tests/task/seeds.py` writes examples/seeds anew.
"""

import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
DOCUMENTS = REPOSITORY.parent / "shared" / "seeds"
EXAMPLES = REPOSITORY / "examples" / "seeds"

# (document, number of its YAML block, file of examples/seeds). A fragment is a file of its own, named by what it asks for.
FILES = [
    ("001_f44e28b17c599e1d.txt", 0, "tpu-vm-resources.yaml"),
    ("001_f44e28b17c599e1d.txt", 1, "train-llama3-8b.yaml"),
    ("001_f44e28b17c599e1d.txt", 2, "tpu-pod-resources.yaml"),
    ("001_f44e28b17c599e1d.txt", 3, "tpu-node-resources.yaml"),
    ("001_f44e28b17c599e1d.txt", 4, "tpu_node_mnist.yaml"),
    ("004_e251d80cdcf4ca9c.txt", 0, "tpu/.dstack.yml"),
    ("004_e251d80cdcf4ca9c.txt", 1, "optimum-tpu/service.dstack.yml"),
    ("004_e251d80cdcf4ca9c.txt", 2, "vllm/service-tpu.dstack.yml"),
    ("004_e251d80cdcf4ca9c.txt", 3, "optimum-tpu/train.dstack.yml"),
]

_FENCE = re.compile(r"^(?P<indent> *)```yaml\n(?P<body>.*?)^ *```", re.M | re.S)
_DIRECTIVE = re.compile(
    r"^\.\. code-block:: yaml\n(?: +:[^\n]*\n)*\n(?P<body>(?:(?P<indent> +)[^\n]*\n(?:(?: *|(?P=indent)[^\n]*)\n)*))",
    re.M,
)


def extract(document: str) -> list[str]:
    """The YAML blocks of a document, in order."""
    found = [*_FENCE.finditer(document), *_DIRECTIVE.finditer(document)]
    return [_dedent(match["body"], match["indent"]) for match in sorted(found, key=lambda match: match.start())]


def _dedent(body: str, indent: str) -> str:
    lines = [line.removeprefix(indent) if line.strip() else "" for line in body.splitlines()]
    return "\n".join(lines).rstrip("\n") + "\n"


def expected() -> dict[str, str]:
    """Each file of examples/seeds with the text its document gives it."""
    return {name: extract((DOCUMENTS / document).read_text())[number] for document, number, name in FILES}


if __name__ == "__main__":
    for file, text in expected().items():
        (EXAMPLES / file).parent.mkdir(parents=True, exist_ok=True)
        (EXAMPLES / file).write_text(text)
