"""Policies of the prefill and decode pools: which worker computes a prompt, which decodes, and how many there should
be.

Pure: reports of members go in, decisions come out. No module here has a clock, a socket or a tensor.

    member.py        a worker's last report                   prefix_index.py   prefixes a member probably has
    route.py         a routing request, and its answer        directory.py      members that probably have a prefix
    prediction.py    predicted costs of a request             member_list.py    members, ordered by load
    router.py        choice of prefill and decode member      links.py          KV transfer rates between members
    no_handover.py   reason why a hand-over does not pay      ratio.py          pool ratio that fits a load
    autoscaler.py    number of members, and which to drain
"""
