/** The engine at work. */
