"""`twostroke bench sweep`: how the times of one engine grow with prompt, context and batch."""
