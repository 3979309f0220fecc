"""The switchboard: one seeded workload under two settings, side by side, beside a server that goes on serving."""
