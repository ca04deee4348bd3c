def test_a(smollm2, shared_data): print(smollm2, shared_data)
