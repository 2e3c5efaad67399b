"""The page's script: its own unit tests, run by Node, and the way in which its modules become one."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import headwise
from headwise.page.write import joined_script

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(headwise.__file__).parent / "page" / "script"


def test_unit_tests_of_the_script_pass():
    if not (node := shutil.which("node")):
        pytest.fail("The tests of the page's script need Node. Run: apt-get install nodejs")
    tests = sorted(str(path) for path in (ROOT / "tests" / "page" / "script").glob("*.test.js"))
    result = subprocess.run([node, "--test", *tests], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-4000:]
    assert int(re.search(r"^# pass (\d+)", result.stdout, re.MULTILINE)[1]) > 300


def test_every_module_is_part_of_the_script_once():
    script = joined_script()
    assert "import " not in re.sub(r'"[^"]*"|`[^`]*`', "", script)
    assert not re.search(r"^export ", script, re.MULTILINE)
    names = re.findall(r"^(?:async )?function (\w+)|^const (\w+) =", script, re.MULTILINE)
    for path in SCRIPT.glob("*.js"):
        first = re.search(r"^export (?:async )?(?:function|const) (\w+)", path.read_text(), re.MULTILINE)
        if first is not None:
            assert sum(first[1] in pair for pair in names) == 1, path.name


def test_the_script_has_no_comments_and_keeps_its_texts():
    script = joined_script()
    assert "/**" not in script
    assert "These ${links.length} links cover" in script
    assert "http://www.w3.org/2000/svg" in script  # the name of a namespace, which is not loaded
