"""Structured outputs: the set of allowed next tokens under a JSON schema, regex, list of choices or grammar.

    StructuredOutputs ── compile ──► text ── matcher ──► GrammarMatcher: fill_mask, accept, fill_mask, accept, …
      of a request        where requests are checked        where tokens are sampled, one per sequence

A compiled grammar is passed as text, so the two sides may run in different processes.
"""
