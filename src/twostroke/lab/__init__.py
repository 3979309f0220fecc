"""The lab: one seeded workload under two settings, compared beside a running server."""
