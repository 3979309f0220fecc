"""`twostroke bench sweep`: times of one engine over prompt length, context and batch size."""
