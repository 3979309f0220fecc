"""Load for a server that speaks OpenAI's API, and what it looks like from the client's side of the socket."""
