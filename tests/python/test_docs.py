# SPDX-License-Identifier: Apache-2.0 OR MIT
"""The examples that people read first run, and print what is said."""

import contextlib
import io
import pathlib
import re

import topkey

SOURCE = pathlib.Path(__file__).parents[2]


def blocks(path, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", (SOURCE / path).read_text(), re.DOTALL | re.MULTILINE)


def output_of(code, names):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(code, "example", "exec"), names)
    return out.getvalue()


def test_the_first_screen_of_the_readme():
    readme = (SOURCE / "README.md").read_text().splitlines()
    code = blocks("README.md", "python")[0]
    assert len(code.splitlines()) == 3
    assert "```python" in readme[:20]
    assert output_of(code, {}) == blocks("README.md", "text")[0]


def test_docs_python():
    names = {}
    for code in blocks("docs/python.md", "python"):
        output_of(code, names)
    found = names["found"]
    assert found.indices.shape == found.scores.shape == (2, 32) and found.indices.max() == found.indices[1].max() < 1000
    assert [sorted(row[row >= 0].tolist()) for row in names["buffer"][:3]] == [[0], [0, 1], []]
    text = (SOURCE / "docs/python.md").read_text()
    assert all(f"`{op}`" in text for op in topkey.operations.OPERATIONS)


def test_docstring_of_the_package():
    example = re.search(r">>> (.*)\n    >>> (.*)\n    >>> (.*)\n    (.*)\n", topkey.__doc__)
    names = {}
    exec(f"{example[1]}\n{example[2]}", names)
    assert repr(eval(example[3], names)) == example[4]
