"""The REST API's schema: one for the controller, its OpenAPI page and the client."""
