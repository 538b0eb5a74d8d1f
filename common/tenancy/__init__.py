"""Tenants: who may call, what each may use, and what each has used.

`directory` has tenants and hashed keys as a value, `sources` where they come from, `keys` and `oidc` turn a credential
into a tenant, `ledger` and `quota` keep limits over all balancers, `usage` records what to bill, `gate` is what
`serving` calls. Only the tier that a request enters by does any of this; those below believe the signed route header.
"""
