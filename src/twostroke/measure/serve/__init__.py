"""Load generator for servers of OpenAI's API, with figures as clients see them."""
