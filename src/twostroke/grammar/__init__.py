"""Structured outputs: which tokens may come next, by a schema, an expression, a list of choices or a grammar.

    StructuredOutputs ── compile ──► text ── matcher ──► GrammarMatcher: fill_mask, accept, fill_mask, accept, …
      of a request        where requests are checked        where tokens are drawn, one per generated sequence

Between the two goes text, so they may be in different processes.
"""
