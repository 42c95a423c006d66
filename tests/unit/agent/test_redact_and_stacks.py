"""Secrets never reach the evidence; stacks tell where the script's main thread was."""

from __future__ import annotations

import pytest

from keepstep.agent import readings, stacks
from keepstep.agent.redact import Redactor

DUMPED = """Thread 0x00007f1 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait
  File "/x/site-packages/torch/utils/data.py", line 9 in get

Current thread 0x00007f2 (most recent call first):
  File "/usr/lib/python3.11/queue.py", line 171 in get
  File "/home/me/data.py", line 41 in load
  File "/home/me/train.py", line 9 in <module>
"""
SPIED = """Process 5: python train.py
Python v3.11.2 (/usr/bin/python3.11)

Thread 5 (idle): "MainThread"
    wait (threading.py:331)
    load (data.py:41)
Thread 9 (idle): "Thread-1"
    other (elsewhere.py:3)
"""


@pytest.mark.parametrize(
    "name", ["KEEPSTEP_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "HF_PAT"]
)
def test_what_variables_with_telling_names_hold_is_hidden(name: str) -> None:
    redactor = Redactor("the-job-s-token")
    redactor.learn({name: "q8w7e6r5", "PATH": "/usr/bin", "EPOCHS": "100000000", "PWD": "/usr/bin"})
    cleaned = redactor.clean(b"x q8w7e6r5 /usr/bin 100000000 the-job-s-token y")
    assert cleaned == b"x *** /usr/bin 100000000 *** y"


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("https://me:hunter22@host/x", "hunter22"),
        ("Authorization: Bearer abcdef123456", "abcdef123456"),
        ("--api-key=abcdef123456", "abcdef123456"),
        ("train.py\0--api-key\0abcdef123456\0--lr\x001", "abcdef123456"),
        ('{"password": "abcdef123456"}', "abcdef123456"),
    ],
)
def test_secrets_are_told_by_their_shape_as_well(text: str, hidden: str) -> None:
    assert hidden not in Redactor().clean_text(text)


def test_ordinary_lines_stay_as_they_are() -> None:
    for line in ("step 12 loss 0.4312", "tokens: 1234567890", "token count 1234567", "key error: 'lost key'"):
        assert Redactor().clean_text(line) == line


def test_the_scripts_own_frame_is_named_not_the_librarys() -> None:
    assert stacks.main_thread(DUMPED) == "data.py:41 in load"
    assert stacks.main_thread(SPIED) in ("data.py:41 in load", "threading.py:331 in wait")
    assert stacks.main_thread("") == "" and stacks.main_thread("rubbish\n  File") == ""


def test_kernel_lines_about_hardware_are_picked_out_when_they_are_recent() -> None:
    xid = "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus"
    records = [(1.0, "Out of memory: Killed"), (5000.0, xid), (5001.0, "usb 1-1: new device")]
    lines = [
        readings._kernel_line(f"6,1,{int(at * 1e6)},-;{text}\n X=y".encode(), 0.0) for at, text in records
    ]
    assert [line[20:] for line in readings.notable(lines, since_s=4000.0)] == [xid]
    assert len(readings.notable(lines)) == 2


def test_the_host_tells_of_itself_whatever_is_missing() -> None:
    assert readings.host()["memory"]["MemTotal"].endswith("kB")
    lines, why = readings.kernel_lines()
    assert lines or why
