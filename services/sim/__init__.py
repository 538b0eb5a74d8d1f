"""`headwater sim`: the production policies in virtual time, on a trace of yours or a public one."""
