"""Communication between ranks: transports, process groups, queues, and traffic metering."""
