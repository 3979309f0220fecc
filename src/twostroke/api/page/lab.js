/** The switchboard. */
