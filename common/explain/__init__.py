"""Why a request went where it went: noted when it is decided, put into words when somebody asks.

`notes` is the only part on a request's path, `decisions` makes a value of a finished request that other processes and
the console can read, `words` says it in sentences, `causes` finds what made it slow, `whatif` asks the same question
again, now or of other policies.
"""
