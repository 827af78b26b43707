"""What a command's exit code says."""

EXIT_FAILED = 1  # once it had begun: numbers that are not finite, data that went bad, an evaluation without an answer
EXIT_MISTAKE = 2  # in recipe, data or folder, before the first step
EXIT_STOPPED = 75  # a signal ended it before its end: the same command goes on (EX_TEMPFAIL of sysexits)
