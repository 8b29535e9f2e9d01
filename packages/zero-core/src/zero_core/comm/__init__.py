"""Communication between ranks: transports, process groups, queues, metering, diagnosis of hangs."""
