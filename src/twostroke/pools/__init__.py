"""Policies of two pools, one for each stroke: who computes a prompt, who decodes, and how many of each there should be.

Pure: what members report goes in, decisions come out. Nothing here has a clock, a socket or a tensor.

    member.py        what a worker says of itself             prefix_index.py   what it is believed to have cached
    route.py         the question, the answer, and why        directory.py      who is believed to have a prefix
    prediction.py    what a request would cost where          roster.py         members in the order of their load
    router.py        who computes a prompt, who decodes       links.py          how fast KV travels between two
    why_alone.py     why a hand-over does not pay             ratio.py          P : D that the load speaks for
    autoscaler.py    how many members, and who is drained
"""
