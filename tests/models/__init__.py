"""Third-party models: each is captured, and must train under every plan as on one device."""
