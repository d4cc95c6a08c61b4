"""What holds for every test, whoever started the tests and how."""

import signal

# Started in the background or under nohup, a process ignores these, and so would every child that a test then signals.
for number, default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, default)
