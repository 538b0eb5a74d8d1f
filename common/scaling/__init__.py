"""Scaling at work: decides every second how many replicas there should be of each model, shows it, and has it done.

What is decided is `common.policy.scaling`; here it is fed with what a tier sees (`scaler`), and carried out: by a POST
(`webhook`), Kubernetes' scale subresource (`kubernetes`), or KEDA, which asks (`keda`). Processes of this machine are
`headwater up`'s business. A tier without `scaling.models` runs none of it.
"""
