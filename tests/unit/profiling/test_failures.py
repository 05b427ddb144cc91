import pytest

from advisor.errors import ScriptError

NET = "import torch\nfrom torch import nn\nnet = nn.Linear(4, 4).cuda()\n"
SCRIPTS = {
    "exits": NET + "raise SystemExit(7)\n",
    "leaves": "import os\nprint('going', flush=True)\nos._exit(3)\n",
    "dies": "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n",
    "crashes": NET + "batch = [1, 2]\nprint(batch[5])\n",
    "asks": NET + "name = input('which run? ')\n",
    "imports": "from no_such_lib.layers import Block\nimport no_such_wheel\n",
    "only_runs": NET + "print(net(torch.zeros(2, 4, device='cuda')).sum())\n",
    "never_updates": NET + "net(torch.zeros(2, 4).cuda()).sum().backward()\n",
    "no_model": "x = 1\n",
    "multiline": "raise SystemExit('no data\\nsecond \\x1b[31mline')\n",
    "hangs": "import subprocess, sys, time\nsubprocess.Popen(['sleep', '1234.5'])\ntime.sleep(600)\n",
}
WORDS = {
    "exits": "exits.py ended by itself with status 7",
    "leaves": "ended by itself with status 3",
    "dies": "was ended by SIGSEGV",
    "crashes": "crashes.py:5 raised IndexError: list index out of range",
    "asks": "asks.py:4 asks for input",
    "imports": "imports no_such_lib and no_such_wheel, which are not installed",
    "only_runs": "never took a training step: it called a model but never backward()",
    "never_updates": "ran a backward pass but never updated",
    "no_model": "ended without calling a model",
    "multiline": "ended by itself (no data second line) before",
    "hangs": "no complete training step within the time limit",
}


@pytest.fixture(scope="module")
def errors(capture_all):
    results, _ = capture_all(SCRIPTS, hangs={"timeout_s": 4.0})
    return results


@pytest.mark.parametrize("name", SCRIPTS)
def test_each_way_to_fail_is_one_sentence_with_a_hint(errors, name):
    error = errors[name]
    assert isinstance(error, ScriptError)
    assert WORDS[name] in error.message
    assert error.hint
    assert "Traceback" not in str(error)
    assert "\n" not in error.message


def test_nothing_that_a_script_started_outlives_its_time(errors, command_lines):
    assert errors["hangs"].message
    running = command_lines()
    assert running, "this test reads /proc"
    assert not any(b"1234.5" in line for line in running)


def test_the_last_output_of_a_dead_script_is_shown(errors):
    assert "going" in errors["leaves"].hint
